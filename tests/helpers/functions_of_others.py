"""Autograd functions that are not this project's, each with the same computation written in torch's operators."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd._functions import Resize
from torch.nn.modules._functions import BackwardHookFunction
from torch.nn.parallel import distributed as data_parallel
from torch.utils.checkpoint import CheckpointFunction

import masked_dispatch as md

T, F = True, False
MASK = torch.tensor([[T, T, T, F], [T, F, F, F]])
SPARSE = (torch.sparse_csr, torch.sparse_coo)
STORAGES = (torch.strided, *SPARSE, torch.jagged)
DENSE, NO_SPARSE = (torch.strided,), (torch.strided, torch.jagged)
Function = Callable[[Tensor, Tensor], Any]


class Case(NamedTuple):
    """A call on a masked x and a plain w, both of shape (2, 4), and the same in operators.

    storages  those whose gradients its backward takes: torch.sparse ones have few operators
    """

    call: Function
    operators: Function
    storages: tuple[torch.layout, ...] = STORAGES


# ------------------------------------------------------------------------------------------------- written by hand


class Scan(torch.autograd.Function):
    """cumsum, whose backward adds step by step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.cumsum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        grad = grad.clone()
        for t in range(grad.shape[1] - 2, -1, -1):
            grad[:, t].add_(grad[:, t + 1])
        return grad


class Triple(torch.autograd.Function):
    """3x, whose backward says so of every element, be it valid or not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return torch.full(grad.shape, 3.0) * grad.to_dense()


class TwoResults(torch.autograd.Function):
    """x · w and x², with saved tensors and a context of its own."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return x * w, x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, product: Tensor, square: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return product * w + 2 * square * x, product * x

    @staticmethod
    def jvp(ctx: Any, x_tangent: Tensor, w_tangent: Tensor | None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        of_w = 0 if w_tangent is None else x * w_tangent
        return x_tangent * w + of_w, 2 * x_tangent * x


class WithoutJvp(TwoResults):
    """The same without a jvp, which Dynamo does not trace."""

    jvp = torch.autograd.Function.jvp


class InPlace(torch.autograd.Function):
    """2x, written into x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2


class ByVjp(torch.autograd.Function):
    """x + w, with `vjp` in place of `backward`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        return x + w

    @staticmethod
    def vjp(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return grad, grad


class Masking(torch.autograd.Function):
    """A masked tensor of a plain one."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return md.as_masked_tensor(w.clone(), MASK)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        grad = grad.clone()
        grad[:, 0].add_(grad[:, 3])
        return grad


BY_HAND = {
    "step by step": Case(lambda x, w: Scan.apply(x * w), lambda x, w: (x * w).cumsum(1), NO_SPARSE),
    "plain for a leaf": Case(lambda x, w: Triple.apply(x), lambda x, w: x * 3),
    "two results": Case(lambda x, w: TwoResults.apply(x, w), lambda x, w: (x * w, x * x), NO_SPARSE),
    "two results in a graph": Case(lambda x, w: WithoutJvp.apply(x, w), lambda x, w: (x * w, x * x), NO_SPARSE),
    "in place": Case(lambda x, w: InPlace.apply(x * w), lambda x, w: x * w * 2),
    "vjp": Case(lambda x, w: ByVjp.apply(x, w), lambda x, w: x + w, NO_SPARSE),
    "makes masked": Case(lambda x, w: Masking.apply(w) * x, lambda x, w: md.as_masked_tensor(w, MASK) * x),
    "nested": Case(lambda x, w: Triple.apply(Triple.apply(x)) * w, lambda x, w: x * 9 * w),
    "shared": Case(lambda x, w: Triple.apply(x) * x + x, lambda x, w: 3 * x * x + x),
}

# --------------------------------------------------------------------------------------------------------- torch's own

_INDEX = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3]])


_WITHOUT_A_GROUP = SimpleNamespace(post_backward=lambda: None, _pre_backward=lambda grad: grad)
_REDUCER = SimpleNamespace(_ddp_sink_clone=True, reducer=None, static_graph=False)


def _checkpointed(x: Tensor, w: Tensor) -> Any:
    return CheckpointFunction.apply(lambda x, w: (x * w).sin(), True, x, w)


CALLED = {
    "torch/utils/checkpoint.py CheckpointFunction": Case(_checkpointed, lambda x, w: (x * w).sin()),
    "torch/nn/modules/_functions.py BackwardHookFunction": Case(
        lambda x, w: BackwardHookFunction.apply(x * 1, w * 1), lambda x, w: (x * 1, w * 1)
    ),
    "torch/nn/parallel/distributed.py _DDPSink": Case(
        lambda x, w: data_parallel._DDPSink.apply(lambda: _REDUCER, x, w), lambda x, w: (x * 1, w * 1)
    ),
    "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py RegisterPostBackwardFunction": Case(
        lambda x, w: _sharding()._fsdp_param_group.RegisterPostBackwardFunction.apply(_WITHOUT_A_GROUP, x, w),
        lambda x, w: (x * 1, w * 1),
    ),
    "torch/_export/db/examples/autograd_function.py MyAutogradFunction": Case(
        lambda x, w: _example().apply(x), lambda x, w: _with_one_more(x * 1), NO_SPARSE
    ),
    "torch/autograd/_functions/tensor.py Resize": Case(
        lambda x, w: Resize.apply(x, (4, 2)), lambda x, w: x.reshape(4, 2), DENSE
    ),
    "torch/_dynamo/_trace_wrapped_higher_order_op.py ModIndex": Case(
        lambda x, w: _mod_index().apply(x, [torch.tensor([1, 0])]),
        lambda x, w: x[torch.tensor([1, 0])],
        DENSE,
    ),
    "torch/ao/quantization/fx/_decomposed.py FakeQuantPerChannel": Case(
        lambda x, w: _quantized().apply(x, torch.ones(2), torch.zeros(2, dtype=torch.int32), 0, -1, 1),
        lambda x, w: x.clamp(-1, 1) - (x.clamp(-1, 1) - x.round().clamp(-1, 1)).detach(),
        DENSE,
    ),
}
_DB = "torch/testing/_internal/autograd_function_db.py"
_OF_DB = {
    "MulGenVmap": Case(lambda x, w: _db().MulGenVmap.apply(x, w), lambda x, w: x * w, NO_SPARSE),
    "SortGenVmap": Case(lambda x, w: _db().SortGenVmap.apply(x, 0)[0], lambda x, w: x.sort(0).values, DENSE),
    "TakeGenVmap": Case(
        lambda x, w: _db().TakeGenVmap.apply(x, _INDEX, _INDEX, 1), lambda x, w: x.gather(1, _INDEX), DENSE
    ),
    "Select": Case(lambda x, w: _db().Select.apply(x, 1), lambda x, w: x[1], DENSE),
    "SelectGenVmap": Case(lambda x, w: _db().SelectGenVmap.apply(x, 1), lambda x, w: x[1], DENSE),
    "ScaleGradGenVmap": Case(
        lambda x, w: _db().ScaleGradGenVmap.apply(x), lambda x, w: _scaled(x * 1, _db().ScaleGradGenVmap.scale)
    ),
    "ZeroGradientsGenVmap": Case(
        lambda x, w: _db().ZeroGradientsGenVmap.apply(x, w), lambda x, w: (_scaled(x * 1, 0), _scaled(w * 1, 0))
    ),
    "ForwardHasDefaultArgs": Case(lambda x, w: _db().ForwardHasDefaultArgs.apply(x, (1,)), lambda x, w: x[1], DENSE),
}
CALLED |= {f"{_DB} {name}": case for name, case in _OF_DB.items()}

# Functions of torch that take no masked tensor on a CPU without other processes, by the reason: file and names.
_REASONS = {
    "its collective needs other processes: tests/helpers/table_of_collectives.py": """
        torch/distributed/nn/functional.py _Broadcast _Gather _Scatter _Reduce _Reduce_Scatter _AllGather _AllGatherBase
        torch/distributed/nn/functional.py _AlltoAll _AlltoAllSingle _AllReduce""",
    "masked operands are taken apart, or refused, before it: masked_dispatch/dispatch/control_flow.py": """
        torch/_higher_order_ops/associative_scan.py AssociativeScanAutogradOp
        torch/_higher_order_ops/base_hop.py BaseHOPFunction
        torch/_higher_order_ops/cond.py CondAutogradOp
        torch/_higher_order_ops/flex_attention.py FlexAttentionAutogradOp
        torch/_higher_order_ops/invoke_leaf_function.py InvokeLeafFunctionAutogradOp
        torch/_higher_order_ops/invoke_subgraph.py InvokeSubgraphAutogradOp
        torch/_higher_order_ops/local_map.py LocalMapAutogradOp
        torch/_higher_order_ops/map.py MapAutogradOp
        torch/_higher_order_ops/scan.py ScanAutogradOp
        torch/_higher_order_ops/while_loop.py WhileLoopAutogradOp""",
    "compiled regions run as it, and what they call is traced with its own boundaries": """
        torch/_functorch/_aot_autograd/runtime_wrappers.py CompiledFunction CompiledFunctionBackward""",
    "it computes in NumPy, for which x.numpy() of a partly invalid tensor raises": """
        torch/testing/_internal/autograd_function_db.py NumpyCube NumpyCubeNotComposable NumpyMul NumpyExp_ NumpySort
        torch/testing/_internal/autograd_function_db.py NumpyTake""",
    "it computes on accelerators alone": """
        torch/_vendor/quack/rmsnorm.py RMSNormFunction
        torch/cuda/graphs.py Graphed
        torch/xpu/graphs.py Graphed
        torch/nn/modules/_functions.py SyncBatchNorm
        torch/nn/parallel/_functions.py Broadcast ReduceAddCoalesced Gather Scatter""",
    "it takes ExpandedWeight, torch's own wrapper of a parameter, alone": """
        torch/nn/utils/_expanded_weights/conv_expanded_weights.py ConvPerSampleGrad
        torch/nn/utils/_expanded_weights/embedding_expanded_weights.py EmbeddingPerSampleGrad
        torch/nn/utils/_expanded_weights/group_norm_expanded_weights.py GroupNormPerSampleGrad
        torch/nn/utils/_expanded_weights/instance_norm_expanded_weights.py InstanceNormPerSampleGrad
        torch/nn/utils/_expanded_weights/layer_norm_expanded_weights.py LayerNormPerSampleGrad
        torch/nn/utils/_expanded_weights/linear_expanded_weights.py LinearPerSampleGrad""",
    "it takes another subclass alone, in which a masked tensor never sits": """
        torch/_subclasses/complex_tensor/_core.py Complex
        torch/distributed/_local_tensor/__init__.py _LocalContiguous
        torch/distributed/tensor/_api.py _ToTorchTensor _FromTorchTensor
        torch/distributed/tensor/_redistribute.py Redistribute NestedRedistribute
        torch/masked/_ops.py Combine
        torch/masked/maskedtensor/_ops_refs.py _MaskedContiguous _MaskedToDense _MaskedToSparse _MaskedToSparseCsr
        torch/masked/maskedtensor/_ops_refs.py _MaskedWhere
        torch/masked/maskedtensor/core.py GetData Constructor
        torch/nested/_internal/nested_tensor.py ViewBufferFromNested ViewNestedFromBuffer""",
    "it is a base of others": "torch/autograd/function.py Function InplaceFunction NestedIOFunction",
    "Dynamo calls it for parameters made in a graph": "torch/_dynamo/create_parameter_op.py TracableCreateParameter",
    "every function in a graph is called as it": "torch/_functorch/autograd_function.py ApplyTemplate",
    "its operator has no rule, and is refused": "torch/_inductor/test_operators.py Realize",
    "lobpcg has no meaning with holes, and is refused": "torch/_lobpcg.py LOBPCGAutogradFunction",
    "its backward raises": "torch/_prims_common/wrappers.py BackwardsNotSupported",
    "its backward asks for the type of its input, which is no dtype": "torch/autograd/_functions/tensor.py Type",
    "it draws: tests/interop/test_distributions.py": "torch/distributions/dirichlet.py _Dirichlet",
    "its sums are elementwise: a channel without a value gives none": "torch/nn/modules/_functions.py CrossMapLRN2d",
    "its backward is no derivative (6 * dinput)": "torch/testing/_internal/autograd_function_db.py CubeGenVmap",
}
NOT_CALLED = {
    f"{path} {name}": reason
    for reason, lines in _REASONS.items()
    for path, *names in map(str.split, lines.strip().splitlines())
    for name in names
}
_BASES = {"Function", "autograd.Function", "torch.autograd.Function", "_SingleLevelFunction"}


def functions_of_torch() -> set[str]:
    """All autograd functions in torch's sources, as "path name", but for torch's tests of processes."""
    root = Path(torch.__file__).parent
    found = set()
    for path in root.rglob("*.py"):
        text = path.read_text(errors="ignore")
        if "testing/_internal/distributed" in str(path) or not re.search(r"^\s*class .*Function\):", text, re.M):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and any(ast.unparse(base) in _BASES for base in node.bases):
                found.add(f"{path.relative_to(root.parent)} {node.name}")
    return found


def _db() -> Any:
    """Loads torch's operator database, which takes seconds that a mere collection need not wait for."""
    from torch.testing._internal import autograd_function_db

    return autograd_function_db


def _sharding() -> Any:
    from torch.distributed.fsdp import _fully_shard

    return _fully_shard


def _example() -> Any:
    from torch._export.db.examples import autograd_function

    return autograd_function.MyAutogradFunction


def _mod_index() -> Any:
    from torch._dynamo._trace_wrapped_higher_order_op import ModIndex

    return ModIndex


def _quantized() -> Any:
    from torch.ao.quantization.fx._decomposed import FakeQuantPerChannel

    return FakeQuantPerChannel


def _with_one_more(x: Tensor) -> Tensor:
    x.register_hook(lambda grad: grad + 1)
    return x


def _scaled(x: Tensor, scale: float) -> Tensor:
    """x, with another derivative."""
    return x * scale + (x * (1 - scale)).detach()


# --------------------------------------------------------------------------------------------------------- operands


def masked(storage: torch.layout, hidden: float = float("nan")) -> Tensor:
    """A leaf of shape (2, 4)."""
    data = torch.tensor([[0.5, -1.5, 0.25, 1.0], [2.0, 0.0, 1.0, 0.5]])
    x = md.masked_tensor(torch.where(MASK, data, hidden), MASK)
    return (x if storage is torch.strided else x.to_layout(storage).detach()).requires_grad_()


def plain() -> Tensor:
    """A leaf of shape (2, 4)."""
    return torch.tensor([[1.0, 2.0, -1.0, 0.5], [0.25, 1.0, 3.0, -2.0]], requires_grad=True)


def listed(results: Any) -> list[Tensor]:
    found = results if isinstance(results, (tuple, list)) else [results]
    return [result for result in found if isinstance(result, Tensor)]


def loss_of(results: Any) -> Tensor:
    """A plain number in which each element of each result counts otherwise."""
    total = torch.zeros(())
    for number, result in enumerate(listed(results)):
        weights = torch.arange(1.0, result.numel() + 1).view(result.shape) * (number + 1)
        weighed = result.to_tensor(0.0) if isinstance(result, md.MaskedTensor) else result
        total = total + (weighed * weights).sum()
    return total


def gradients(function: Function, storage: torch.layout) -> tuple[Tensor | None, Tensor | None]:
    """What backward leaves in `.grad` of x and of w."""
    x, w = masked(storage), plain()
    loss_of(function(x, w)).backward()
    return x.grad, w.grad


def tangents(function: Function, x: Tensor, x_tangent: Tensor) -> list[Tensor | None]:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x_tangent)
        w = forward_ad.make_dual(plain().detach(), torch.full((2, 4), 7.0))
        return [forward_ad.unpack_dual(result).tangent for result in listed(function(dual, w))]


def has_tangents(function: Function) -> bool:
    """Whether torch differentiates a function of plain tensors in forward mode."""
    try:
        tangents(function, plain().detach(), plain().detach())
    except (NotImplementedError, RuntimeError):
        return False
    return True


# In some of the supported releases.
BEFORE_BACKWARD = "torch/distributed/fsdp/_fully_shard/_fsdp_state.py RegisterPreBackwardFunction"
if " RegisterPreBackwardFunction(" in (Path(torch.__file__).parent.parent / BEFORE_BACKWARD.split()[0]).read_text():
    CALLED[BEFORE_BACKWARD] = Case(
        lambda x, w: _sharding()._fsdp_state.RegisterPreBackwardFunction.apply(_WITHOUT_A_GROUP, x),
        lambda x, w: x * 1,
        DENSE,
    )
CASES = {**BY_HAND, **CALLED}
# Those of a jvp, which takes tangents of plain tensors.
WITH_TANGENTS = {"two results", *(f"{_DB} {name}" for name in _OF_DB), *CASES.keys() & {BEFORE_BACKWARD}}
