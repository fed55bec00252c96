"""torch's functional collectives of sparsely stored masked tensors; results have the storage of the operand.

Entry counts of other ranks are only known at run time, so these collectives cannot be traced. As in torch, backward
differentiates the sum of all ranks' outputs: the gradient of an element lies on the rank that received it, so the
backward of a collective is another collective. Only first derivatives are supported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from masked_dispatch.autograd.sparse import values_at
from masked_dispatch.distributed import collectives
from masked_dispatch.distributed.calls import Finish
from masked_dispatch.distributed.sparse_calls import SparseCall, in_one, stored_record
from masked_dispatch.distributed_internals import Group, process_group_named
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor, wrap_sparse
from op_registry import MaskedSemanticsError
from op_registry.records.dense import Dense
from op_registry.records.fill import OwnFunction
from op_registry.records.tracing import being_traced
from op_registry.sparse.record import Sparse

# A collective takes one tensor and returns one.
Collective = Callable[[SparseMaskedTensor], Tensor]


class _Context(Protocol):
    """The records of the operand and of the result, and the collective that computes the gradient."""

    own: Sparse
    arrived: Sparse
    back: Collective


class Differentiable(OwnFunction):
    """An autograd function whose forward and backward are collectives."""

    @staticmethod
    def forward(ctx: _Context, tensor: SparseMaskedTensor, collective: Collective, back: Collective) -> Any:
        result: Any = collective(tensor.detached())
        ctx.own, ctx.arrived, ctx.back = _by_itself(tensor), _by_itself(result), back
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> Any:
        gradient = ctx.back(_at(grad.detach(), ctx.arrived))
        return _at(gradient, ctx.own), None, None


def _at(gradient: Tensor, record: Sparse) -> SparseMaskedTensor:
    """Read a gradient at the elements of a record: 0 where the gradient is invalid, invalid where the record is."""
    values = values_at(gradient, record, None)
    return wrap_sparse(Sparse(Dense(values, record.values.full_validity), record.pattern))


def _differentiable(tensor: SparseMaskedTensor, collective: Collective, back: Collective) -> Tensor:
    if tensor.requires_grad and torch.is_grad_enabled():
        return Differentiable.apply(tensor, collective, back)
    return collective(tensor)


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


def all_reduce(tensor: SparseMaskedTensor, reduce_op: str, group: Group) -> Tensor:
    divisor = _Divisor(reduce_op.lower())

    def reduced(x: SparseMaskedTensor) -> Tensor:
        result = _copy(x, "all_reduce")
        finish = collectives.all_reduce(SparseCall, [result], process_group_named(group), divisor.op, divisor.counted)
        return _done(finish, result)

    return _differentiable(tensor, reduced, lambda grad: all_reduce(divisor.of(grad), "sum", group))


def broadcast(tensor: SparseMaskedTensor, src: int, group: Group) -> Tensor:
    def sent(x: SparseMaskedTensor) -> Tensor:
        result = _copy(x, "broadcast")
        return _done(collectives.broadcast(SparseCall, [result], process_group_named(group), src), result)

    def back(grad: SparseMaskedTensor) -> Tensor:
        """Sum the gradients over ranks on the sending rank; the operands of other ranks get no gradient."""
        total = all_reduce(grad, "sum", group)
        return total if process_group_named(group).rank() == src else torch.zeros_like(total)

    return _differentiable(tensor, sent, back)


def reduce_scatter_tensor(tensor: SparseMaskedTensor, reduce_op: str, group_size: int, group: Group) -> Tensor:
    divisor = _Divisor(reduce_op.lower())

    def reduced(x: SparseMaskedTensor) -> Tensor:
        result = _rows_of(x, x.shape[0] // group_size, "reduce_scatter_tensor")
        options = (process_group_named(group), divisor.op, divisor.counted)
        return _done(collectives.reduce_scatter_tensor(SparseCall, result, x, *options), result)

    return _differentiable(tensor, reduced, lambda grad: all_gather_into_tensor(divisor.of(grad), group_size, group))


def all_gather_into_tensor(tensor: SparseMaskedTensor, group_size: int, group: Group) -> Tensor:
    def gathered(x: SparseMaskedTensor) -> Tensor:
        parts = [_copy(x, "all_gather_into_tensor") for _ in range(group_size)]
        collectives.all_gather(SparseCall, [parts], [x], process_group_named(group))()
        return in_one([stored_record(part) for part in parts])

    return _differentiable(tensor, gathered, lambda grad: reduce_scatter_tensor(grad, "sum", group_size, group))


def all_to_all_single(tensor: SparseMaskedTensor, received: Sequence[int], sent: Sequence[int], group: Group) -> Tensor:
    """Exchange rows between ranks; `received` and `sent` are the numbers of rows for each rank."""

    def exchanged(x: SparseMaskedTensor) -> Tensor:
        result = _rows_of(x, sum(received), "all_to_all_single")
        options = (process_group_named(group), received, sent)
        return _done(collectives.all_to_all_single(SparseCall, result, x, *options), result)

    return _differentiable(tensor, exchanged, lambda grad: all_to_all_single(grad, sent, received, group))


def _done(finish: Finish, result: Tensor) -> Tensor:
    finish()
    return result


def _copy(tensor: SparseMaskedTensor, call: str) -> Tensor:
    """Copy the tensor, as the output of an in-place collective."""
    if being_traced(tensor._kept_values):
        raise MaskedSemanticsError(
            f"{call} of a tensor of shape {tuple(tensor.shape)} that is stored as {tensor.storage_layout}: the "
            "number of elements that other ranks store is not known in a graph. Pass x.to_dense(), or call it "
            "outside of the compiled region."
        )
    return wrap_sparse(_by_itself(tensor))


def _by_itself(tensor: SparseMaskedTensor) -> Sparse:
    """Return the record of the tensor, or of a copy if the tensor is a view."""
    record: Any = tensor.record
    if not isinstance(record, Sparse):
        copied: Any = tensor.detached().clone()
        record = copied.record
    assert isinstance(record, Sparse)
    return record


def _rows_of(tensor: SparseMaskedTensor, rows: int, call: str) -> Tensor:
    """Return an output tensor of the same storage with this many rows."""
    _copy(tensor, call)
    parts: list[Tensor] = [tensor] * -(-rows // max(tensor.shape[0], 1)) or [tensor]
    part: Any = torch.cat(parts)[:rows]
    return wrap_sparse(part.record)
