"""torch's functional collectives of sparsely stored masked tensors: new tensors, stored like the operand.

The number of entries of another rank is known when it has said it, so that nothing here can be traced. As in torch, the
derivative is that of the sum of what all ranks compute from their results: what went to a rank has its gradient there,
so each collective has another one as its derivative. There are first derivatives alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from masked_dispatch.autograd.sparse import values_at
from masked_dispatch.distributed import sparse_collectives
from masked_dispatch.distributed.collectives import Finish
from masked_dispatch.distributed_internals import Group, process_group_named
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor, wrap_sparse
from op_registry import MaskedSemanticsError
from op_registry.records.dense import Dense
from op_registry.records.own_function import OwnFunction
from op_registry.records.tracing import being_traced
from op_registry.sparse.record import Sparse

# A collective of one tensor.
Collective = Callable[[SparseMaskedTensor], Tensor]


class _Context(Protocol):
    """The records of the operand and of the result, and the collective that gives the gradient."""

    own: Sparse
    arrived: Sparse
    back: Collective


class Differentiable(OwnFunction):
    """A collective, and another one for its derivative."""

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
    """A gradient at the elements of a record: 0 where it is invalid, and invalid where the record is."""
    values = values_at(gradient, record, None)
    return wrap_sparse(Sparse(Dense(values, record.values.full_validity), record.pattern))


def _differentiable(tensor: SparseMaskedTensor, collective: Collective, back: Collective) -> Tensor:
    if tensor.requires_grad and torch.is_grad_enabled():
        result: Tensor = Differentiable.apply(tensor, collective, back)
        return result
    return collective(tensor)


class _Divisor:
    """What a gradient is divided by as the values of a reduction were: in an average, by how many ranks contributed."""

    def __init__(self, op: str) -> None:
        self.op = op
        self.number: SparseMaskedTensor | None = None
        # The forward knows the number of contributions to each element of its result.
        self.counted = self.keep if op == "avg" else None

    def keep(self, number: Sparse) -> None:
        self.number = wrap_sparse(number)

    def of(self, gradient: SparseMaskedTensor) -> SparseMaskedTensor:
        if self.op == "sum":
            return gradient
        if self.op != "avg":
            raise RuntimeError(
                f"{self.op.upper()} of sparsely stored tensors has no derivative over ranks, as torch's own "
                "collectives of that reduction have none: use SUM or AVG, or pass x.detach()"
            )
        assert self.number is not None  # counted in forward
        divided: Any = gradient / self.number
        return divided


def all_reduce(tensor: SparseMaskedTensor, reduce_op: str, group: Group) -> Tensor:
    divisor = _Divisor(reduce_op.lower())

    def reduced(x: SparseMaskedTensor) -> Tensor:
        result = _copy(x, "all_reduce")
        start: Callable[..., Finish] = sparse_collectives.all_reduce
        return _done(start([result], process_group_named(group), divisor.op, divisor.counted), result)

    return _differentiable(tensor, reduced, lambda grad: all_reduce(divisor.of(grad), "sum", group))


def broadcast(tensor: SparseMaskedTensor, src: int, group: Group) -> Tensor:
    def sent(x: SparseMaskedTensor) -> Tensor:
        result = _copy(x, "broadcast")
        return _done(sparse_collectives.broadcast([result], process_group_named(group), src), result)

    def back(grad: SparseMaskedTensor) -> Tensor:
        """The sum over ranks on the rank that has sent; what the others had went nowhere."""
        total = all_reduce(grad, "sum", group)
        return total if process_group_named(group).rank() == src else torch.zeros_like(total)

    return _differentiable(tensor, sent, back)


def reduce_scatter_tensor(tensor: SparseMaskedTensor, reduce_op: str, group_size: int, group: Group) -> Tensor:
    divisor = _Divisor(reduce_op.lower())

    def reduced(x: SparseMaskedTensor) -> Tensor:
        result = _rows_of(x, x.shape[0] // group_size, "reduce_scatter_tensor")
        start: Callable[..., Finish] = sparse_collectives.reduce_scatter_tensor
        return _done(start(result, x, process_group_named(group), divisor.op, divisor.counted), result)

    return _differentiable(tensor, reduced, lambda grad: all_gather_into_tensor(divisor.of(grad), group_size, group))


def all_gather_into_tensor(tensor: SparseMaskedTensor, group_size: int, group: Group) -> Tensor:
    def gathered(x: SparseMaskedTensor) -> Tensor:
        parts: list[Tensor] = [_copy(x, "all_gather_into_tensor") for _ in range(group_size)]
        sparse_collectives.all_gather([parts], [x], process_group_named(group))()
        return torch.cat(parts)

    return _differentiable(tensor, gathered, lambda grad: reduce_scatter_tensor(grad, "sum", group_size, group))


def all_to_all_single(tensor: SparseMaskedTensor, received: Sequence[int], sent: Sequence[int], group: Group) -> Tensor:
    """`received` and `sent` are rows for each rank."""

    def exchanged(x: SparseMaskedTensor) -> Tensor:
        result = _rows_of(x, sum(received), "all_to_all_single")
        start: Callable[..., Finish] = sparse_collectives.all_to_all_single
        return _done(start(result, x, process_group_named(group), received, sent), result)

    return _differentiable(tensor, exchanged, lambda grad: all_to_all_single(grad, sent, received, group))


def _done(finish: Finish, result: Tensor) -> Tensor:
    finish()
    return result


def _copy(tensor: SparseMaskedTensor, call: str) -> Tensor:
    """A tensor of the same storage, to be written to."""
    if being_traced(tensor._kept_values):
        raise MaskedSemanticsError(
            f"{call} of a tensor of shape {tuple(tensor.shape)} that is stored as {tensor.storage_layout}: how much "
            "other ranks store is not known in a graph. Pass x.to_dense(), or call it outside of the compiled region."
        )
    return wrap_sparse(_by_itself(tensor))


def _by_itself(tensor: SparseMaskedTensor) -> Sparse:
    """The record of the tensor, or of a copy that is no view."""
    record: Any = tensor.record
    if not isinstance(record, Sparse):
        copied: Any = tensor.detached().clone()
        record = copied.record
    assert isinstance(record, Sparse)
    return record


def _rows_of(tensor: SparseMaskedTensor, rows: int, call: str) -> Tensor:
    """A tensor of so many rows, stored alike, to be written to."""
    _copy(tensor, call)
    parts: list[Tensor] = [tensor] * -(-rows // max(tensor.shape[0], 1)) or [tensor]
    part: Any = torch.cat(parts)[:rows]
    return wrap_sparse(part.record)
