"""Preparation for torch.compile, before the first trace.

* Compiled regions may return masked outputs that the loss does not depend on.
* Higher-order operators (checkpoint …) take masked tensors.
* Dynamo rewrites addcmul_, addcdiv_ and add_ with numbers in optimizers to inductor's fused multiply-add.
* x.new_tensor(data) calls the masked tensor's method; x[index] = value on sparse storage calls a method too.
* A refusal breaks the graph.
* Dynamo traces the backward of an autograd function with plain gradients.
* torch.export takes masked parameters and buffers, and refuses masked arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from masked_dispatch.compiler_internals import (
    accept_unused_outputs,
    before_export_unwraps,
    before_tracing,
    break_graphs_at,
    dynamo_is_loaded,
    exported_arguments,
    fused_multiply_add,
    give_plain_gradients,
    know_storages_of,
    place_views_of,
    record_new_tensor_of,
    record_writes_of,
    trace_only_calls_of,
)
from masked_dispatch.dispatch.fast_paths import elementwise_kernel
from masked_dispatch.dispatch.kernel_table import kernel_table
from masked_dispatch.dispatch.views import known_from_graph, view_from_graph
from masked_dispatch.interop.crossing import as_masked, filled
from masked_dispatch.interop.gradients_of_others import in_torch_sparse
from masked_dispatch.tensor.masked_tensor import MaskedTensor, wrap
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor, refuse_tangent
from masked_dispatch.torch_internals import serve_higher_order_operators
from op_registry import MaskedSemanticsError
from op_registry.laws.categories import ELEMENTWISE, run_elementwise
from op_registry.rule import Rule
from op_registry.traits import Traits


def install() -> None:
    """The package calls this once, at import."""
    before_tracing.append(prepare)
    trace_only_calls_of("masked_dispatch", "op_registry")


def prepare() -> None:
    """Prepare once; runs whenever a masked tensor enters a graph that is being traced."""
    for argument in exported_arguments():
        if isinstance(argument, MaskedTensor):
            raise MaskedSemanticsError(
                f"torch.export was given a masked tensor of shape {tuple(argument.shape)} as an argument, and an "
                "exported program takes plain tensors. Use program = masked_dispatch.export(module, args), which takes "
                "(data, mask) in place of it and runs without this library; for ONNX torch.onnx.export(program, "
                "f='model.onnx', dynamo=True)."
            )
    accept_unused_outputs({MaskedTensor: lambda zeros: wrap(zeros, None), SparseMaskedTensor: refuse_tangent})
    serve_higher_order_operators()
    before_export_unwraps(_split_exported_state)
    place_views_of(MaskedTensor, view_from_graph, known_from_graph)
    if dynamo_is_loaded():
        record_new_tensor_of(MaskedTensor)
        record_writes_of(SparseMaskedTensor, SparseMaskedTensor._written.__name__)
        break_graphs_at(MaskedSemanticsError)
        know_storages_of(MaskedTensor)
        give_plain_gradients(MaskedTensor, torch.ops.masked_dispatch.plain_gradient.default, in_torch_sparse)
        _teach_fused_multiply_add()


def _split_exported_state(module: nn.Module) -> None:
    # The new program takes this module's state, and torch refuses buffers in it that are not persistent.
    split_masked_state(module, save_all=True)


@functools.cache
def _teach_fused_multiply_add() -> None:
    """fma(a, b, c) is a · b + c: elementwise, like addcmul."""
    op = fused_multiply_add()
    traits = Traits(derivative="bilinear")
    # Do not use the registry: its version would change while Dynamo traces a graph that guards on it.
    rule = Rule(
        (op,), ELEMENTWISE, run_elementwise, takes_op=True, where="masked_dispatch/dispatch/compile.py", traits=traits
    )
    kernel_table.put(op, elementwise_kernel(op, rule))


# ----------------------------------------------------------------------------------------------------- exported modules


def split_masked_state(module: nn.Module, save_all: bool = False) -> nn.Module:
    """Replace masked parameters and buffers of `module` and its children by plain ones, in place; returns the module.

    A masked `w` becomes a parameter (or buffer) `w_data`, 0 where invalid, and a buffer `w_mask`; each read of `w` then
    computes it from the two. This also replaces masked tensors that are other attributes, and stores a tensor that
    several modules share once.

    save_all  whether state_dict() from now on includes buffers that it left out
    """
    parts: dict[int, tuple[Tensor, Tensor]] = {}
    for owner in module.modules():
        _split(owner, parts, save_all)
    return module


def _split(owner: nn.Module, parts: dict[int, tuple[Tensor, Tensor]], save_all: bool) -> None:
    reads: dict[str, property] = {}
    for holder in (owner._parameters, owner._buffers, vars(owner)):
        for name, value in list(holder.items()):
            if not isinstance(value, MaskedTensor):
                continue
            if id(value) not in parts:
                parts[id(value)] = _parts_of(value, is_parameter=holder is owner._parameters)
            data, mask = parts[id(value)]
            transient = holder is vars(owner) or name in owner._non_persistent_buffers_set
            persistent = save_all or not transient
            del holder[name]
            if isinstance(data, nn.Parameter):
                owner.register_parameter(f"{name}_data", data)
            else:
                owner.register_buffer(f"{name}_data", data, persistent)
            owner.register_buffer(f"{name}_mask", mask, persistent)
            reads[name] = property(_masked_again(name))
    if reads:
        owner.__class__ = type(type(owner).__name__, (type(owner),), {**reads, "__module__": type(owner).__module__})


def _parts_of(tensor: MaskedTensor, is_parameter: bool) -> tuple[Tensor, Tensor]:
    """The data, 0 where invalid, as a leaf of the same kind, and the mask."""
    data = filled(tensor).detach()
    if is_parameter:
        data = nn.Parameter(data, tensor.requires_grad)
    return data, tensor.get_mask()


def _masked_again(name: str) -> Callable[[Any], Tensor]:
    data_name, mask_name = f"{name}_data", f"{name}_mask"

    def read(self: Any) -> Tensor:
        return as_masked(getattr(self, data_name), getattr(self, mask_name))

    return read
