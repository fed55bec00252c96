"""torch's functional collectives (`_c10d_functional` operators) of masked tensors.

They are the collectives of collectives.py that return new tensors, and are differentiable as torch's are. Dense tensors
travel by torch's own operators, which record the derivative. In a graph the ranks cannot agree first, as a graph cannot
wait for an answer: they always send masks, and mismatches raise torch's errors.

Entry counts of other ranks are only known at run time, so sparsely stored tensors cannot be traced. As in torch, their
backward differentiates the sum of all ranks' outputs: the gradient of an element lies on the rank that received it, so
the backward of a collective is another collective. Only first derivatives are supported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.library import Library

from masked_dispatch.autograd.dense import wrap_record
from masked_dispatch.autograd.sparse import values_at
from masked_dispatch.compiler_internals import never_compiled
from masked_dispatch.dispatch.kernel_table import Kernel, kernel_table
from masked_dispatch.dispatch.run_rule import has_masked, unwrap_argument
from masked_dispatch.distributed import collectives
from masked_dispatch.distributed.agreement import Description
from masked_dispatch.distributed.calls import Call, Finish, replace_extent
from masked_dispatch.distributed.messages import Functional
from masked_dispatch.distributed.sparse_calls import Entries, SparseCall
from masked_dispatch.distributed.sparse_calls import in_one as sparse_in_one
from masked_dispatch.distributed_internals import Group, process_group_named
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor, wrap_sparse
from masked_dispatch.torch_internals import DispatchKeySet, redispatch
from op_registry import MaskedSemanticsError
from op_registry.records.dense import Dense
from op_registry.records.fill import OwnFunction
from op_registry.records.tracing import being_traced
from op_registry.sparse.record import Sparse

# -------------------------------------------------------------------------------- collectives that return new tensors


class Returned(Call):
    """One functional collective of dense tensors; in a graph, all ranks are taken to know the same."""

    returns = True

    def transport_of(self, group: ProcessGroup, sent: Sequence[Any]) -> Any:
        self.in_graph = being_traced(sent[0]._stored_tensors[0])
        return Functional(group, self.in_graph)

    def agree(self, group: ProcessGroup, mine: Description, device: torch.device) -> list[Description]:
        if not self.in_graph:
            with torch.no_grad():
                return super().agree(group, mine, device)
        if mine.problem is not None:
            raise MaskedSemanticsError(f"{mine.call}: {mine.problem}")
        return [dataclasses.replace(mine, partial=True)] * group.size()

    def problem_of(self, sent: Sequence[Tensor], outputs: Sequence[Tensor], pairwise: bool) -> str | None:
        return None

    def record_of(self, tensor: Tensor) -> Dense:
        """Return the record with its derivative; without an extent on ranks whose tensor is not sent."""
        record: Any = unwrap_argument(tensor)
        return record if self.root in (None, self.rank) else Dense(record.data, record.validity)

    def write(self, target: Tensor, record: Any) -> Any:
        return wrap_record(record)


class SparseReturned(SparseCall):
    """One functional collective of sparsely stored tensors."""

    returns = True

    def write(self, target: Tensor, record: Entries) -> Any:
        return wrap_sparse(record.record)

    def write_whole(self, target: Tensor, records: Sequence[Entries]) -> Any:
        return sparse_in_one([entries.record for entries in records])


# A collective of collectives.py takes a storage and one tensor; that of a gradient takes and returns a sparse tensor.
Collective = Callable[[type[Call], Any], Finish]
OfGradient = Callable[[SparseMaskedTensor], Tensor]


def returned(collective: Collective, tensor: Tensor, back: OfGradient) -> Any:
    """Return the result of a collective; `back` computes the gradient of a sparsely stored tensor."""
    if not isinstance(tensor, SparseMaskedTensor):
        return _only(collective(Returned, tensor)())
    if being_traced(tensor._kept_values):
        raise MaskedSemanticsError(
            f"a functional collective of a tensor of shape {tuple(tensor.shape)} that is stored as "
            f"{tensor.storage_layout}: the number of elements that other ranks store is not known in a graph. Pass "
            "x.to_dense(), or call it outside of the compiled region."
        )
    return OfSparse.apply(tensor, collective, back)


def _only(result: Any) -> Any:
    return result[0] if isinstance(result, list) else result


class _Context(Protocol):
    """The records of the operand and of the result, and the collective that computes the gradient."""

    own: Sparse
    arrived: Sparse
    back: OfGradient


class OfSparse(OwnFunction):
    """A function whose forward and backward are collectives of a sparsely stored tensor."""

    @staticmethod
    def forward(ctx: _Context, tensor: SparseMaskedTensor, collective: Collective, back: OfGradient) -> Any:
        ctx.own, ctx.back = _by_itself(tensor), back
        result = _only(collective(SparseReturned, wrap_sparse(ctx.own))())
        ctx.arrived = _by_itself(result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> Any:
        gradient = ctx.back(_at(grad.detach(), ctx.arrived))
        return _at(gradient, ctx.own), None, None


def _by_itself(tensor: SparseMaskedTensor) -> Sparse:
    """Return the record of the tensor, or of a copy if the tensor is a view."""
    record: Any = tensor.record
    if not isinstance(record, Sparse):
        copied: Any = tensor.detached().clone()
        record = copied.record
    assert isinstance(record, Sparse)
    return record


def _at(gradient: Tensor, record: Sparse) -> SparseMaskedTensor:
    """Read a gradient at the elements of a record: 0 where the gradient is invalid, invalid where the record is."""
    values = values_at(gradient, record, None)
    return wrap_sparse(Sparse(Dense(values, record.values.full_validity), record.pattern))


class _Divisor:
    """The divisor of a gradient, equal to that of the reduction: in an average, the number of contributing ranks."""

    def __init__(self, op: str) -> None:
        self.op = op
        self.number: SparseMaskedTensor | None = None
        # The forward counts the contributions to each element of its result.
        self.counted = self.keep if op == "avg" else None

    def keep(self, number: Sparse) -> None:
        self.number = wrap_sparse(number)

    def of(self, gradient: SparseMaskedTensor) -> SparseMaskedTensor:
        if self.op == "sum":
            return gradient
        if self.op != "avg":
            raise RuntimeError(
                f"{self.op.upper()} of sparsely stored tensors has no derivative across ranks, because torch's own "
                "collectives have none for that reduction: use SUM or AVG, or pass x.detach()"
            )
        assert self.number is not None  # counted in forward
        divided: Any = gradient / self.number
        return divided


# ------------------------------------------------------------------------------------------------------ the operators


def output_of(of: type[Call], tensor: Tensor, rows: int) -> Tensor:
    """Return a tensor that tells a collective the form of its result: this many rows like those of the tensor."""
    if of is Returned:
        return torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")
    parts: list[Tensor] = [tensor] * -(-rows // max(tensor.shape[0], 1)) or [tensor]
    part: Any = torch.cat(parts)[:rows]
    return wrap_sparse(part.record)


def all_reduce(tensor: Tensor, reduce_op: str, group: Group) -> Tensor:
    ranks, divisor = process_group_named(group), _Divisor(reduce_op.lower())

    def reduced(of: type[Call], x: Tensor) -> Finish:
        return collectives.all_reduce(of, [x], ranks, divisor.op, divisor.counted)

    return returned(reduced, tensor, lambda grad: all_reduce(divisor.of(grad), "sum", group))


def reduce_scatter_tensor(tensor: Tensor, reduce_op: str, group_size: int, group: Group) -> Tensor:
    ranks, divisor = process_group_named(group), _Divisor(reduce_op.lower())
    rows = tensor.shape[0] // group_size if tensor.ndim else 0

    def reduced(of: type[Call], x: Tensor) -> Finish:
        output = output_of(of, x, rows)
        return collectives.reduce_scatter_tensor(of, output, x, ranks, divisor.op, divisor.counted)

    return returned(reduced, tensor, lambda grad: all_gather_into_tensor(divisor.of(grad), group_size, group))


def all_gather_into_tensor(tensor: Tensor, group_size: int, group: Group) -> Tensor:
    ranks = process_group_named(group)
    rows = group_size * (tensor.shape[0] if tensor.ndim else 1)

    def gathered(of: type[Call], x: Tensor) -> Finish:
        return collectives.all_gather_into_tensor(of, output_of(of, x, rows), x, ranks)

    return returned(gathered, tensor, lambda grad: reduce_scatter_tensor(grad, "sum", group_size, group))


def broadcast(tensor: Tensor, src: int, group: Group) -> Tensor:
    ranks = process_group_named(group)

    def back(grad: SparseMaskedTensor) -> Tensor:
        """Sum the gradients over ranks on the sending rank; the operands of other ranks get no gradient."""
        total = all_reduce(grad, "sum", group)
        return total if ranks.rank() == src else torch.zeros_like(total)

    return returned(lambda of, x: collectives.broadcast(of, [x], ranks, src), tensor, back)


def all_to_all_single(tensor: Tensor, received: Sequence[int], sent: Sequence[int], group: Group) -> Tensor:
    """Exchange rows between ranks; `received` and `sent` are the numbers of rows for each rank."""
    ranks = process_group_named(group)

    def exchanged(of: type[Call], x: Tensor) -> Finish:
        return collectives.all_to_all_single(of, output_of(of, x, sum(received)), x, ranks, received, sent)

    return returned(exchanged, tensor, lambda grad: all_to_all_single(grad, sent, received, group))


def replaced(target: Tensor, arrived: Any) -> Tensor:
    """Write what has arrived, with its extent; a graph asserts that the target has the same."""
    if isinstance(target, MaskedTensor) and not being_traced(target._stored_tensors[0]):
        replace_extent(target, arrived._extent)
    return target.copy_(arrived)


def in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Write the result to the tensor, for operators that change it."""
    return lambda tensor, *args: replaced(tensor, function(tensor, *args))


def into_out(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Write the result to `out`, for operators that have it."""
    return lambda tensor, *args, out: replaced(out, function(tensor, *args))


def each(function: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    """Apply the function to each tensor, for operators that take a list of tensors."""
    return lambda tensors, *args: [function(tensor, *args) for tensor in tensors]


def as_it_is(tensor: Tensor) -> Tensor:
    """Return the tensor, which has arrived already."""
    return tensor


# What is served of each collective, by the end of the operator's name; torch has some of these of each.
VARIANTS: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Any]]] = {
    "": lambda function: function,
    "_": in_place,
    "_out": into_out,
    "_coalesced": each,
    "_coalesced_": lambda function: each(in_place(function)),
}
COLLECTIVES: tuple[Callable[..., Tensor], ...] = (
    *(all_reduce, all_gather_into_tensor, reduce_scatter_tensor, all_to_all_single, broadcast),
)
SERVED: dict[str, Callable[..., Any]] = {
    **{function.__name__ + end: of(function) for function in COLLECTIVES for end, of in VARIANTS.items()},
    "wait_tensor": as_it_is,
}


def functional_kernel(op: OpOverload, function: Callable[..., Any]) -> Kernel:
    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if not has_masked(args) and not has_masked(kwargs.values()):
            return redispatch(op, keyset, args, kwargs)
        return function(*args, **kwargs)

    return kernel


# torch's module of functional collectives defines `_wrap_tensor_autograd`, and may not have been imported yet.
_library = Library("_c10d_functional", "IMPL")


def not_wrapped(keyset: DispatchKeySet, tensor: Tensor) -> Tensor:
    """Return a masked tensor without torch's wrapper for pending results, because its data has arrived."""
    if isinstance(tensor, MaskedTensor):
        return tensor
    return redispatch(torch.ops._c10d_functional._wrap_tensor_autograd.default, keyset, (tensor,), {})


def install() -> None:
    """The package calls this once, on import."""
    for operators in (torch.ops._c10d_functional, torch.ops._c10d_functional_autograd):
        for name, function in SERVED.items():
            if hasattr(operators, name):
                op = getattr(operators, name).default
                kernel_table.put(op, functional_kernel(op, function))
    _library.impl("_wrap_tensor_autograd", never_compiled(not_wrapped), "PreDispatch", with_keyset=True)
