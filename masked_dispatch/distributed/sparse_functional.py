"""torch's functional collectives of sparsely stored masked tensors: new tensors, stored like the operand.

The number of entries of another rank is known when it has said it, so that nothing here can be traced. There are no
derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from masked_dispatch.distributed import sparse_collectives
from masked_dispatch.distributed.collectives import Finish
from masked_dispatch.distributed_internals import Group, process_group_named
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor, wrap_sparse
from op_registry import MaskedSemanticsError
from op_registry.records.tracing import being_traced
from op_registry.sparse.record import Sparse


def all_reduce(tensor: SparseMaskedTensor, reduce_op: str, group: Group) -> Tensor:
    result = _copy(tensor, "all_reduce")
    return _done(sparse_collectives.all_reduce([result], process_group_named(group), reduce_op.lower()), result)


def broadcast(tensor: SparseMaskedTensor, src: int, group: Group) -> Tensor:
    result = _copy(tensor, "broadcast")
    return _done(sparse_collectives.broadcast([result], process_group_named(group), src), result)


def reduce_scatter_tensor(tensor: SparseMaskedTensor, reduce_op: str, group_size: int, group: Group) -> Tensor:
    result = _rows_of(tensor, tensor.shape[0] // group_size, "reduce_scatter_tensor")
    start = sparse_collectives.reduce_scatter_tensor
    return _done(start(result, tensor, process_group_named(group), reduce_op.lower()), result)


def all_gather_into_tensor(tensor: SparseMaskedTensor, group_size: int, group: Group) -> Tensor:
    parts: list[Tensor] = [_copy(tensor, "all_gather_into_tensor") for _ in range(group_size)]
    sparse_collectives.all_gather([parts], [tensor], process_group_named(group))()
    return torch.cat(parts)


def all_to_all_single(tensor: SparseMaskedTensor, received: Sequence[int], sent: Sequence[int], group: Group) -> Tensor:
    """`received` and `sent` are rows for each rank."""
    result = _rows_of(tensor, sum(received), "all_to_all_single")
    start: Callable[..., Finish] = sparse_collectives.all_to_all_single
    return _done(start(result, tensor, process_group_named(group), received, sent), result)


def _done(finish: Finish, result: Tensor) -> Tensor:
    finish()
    return result


def _copy(tensor: SparseMaskedTensor, call: str) -> Tensor:
    """A tensor of the same storage, to be written to."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise MaskedSemanticsError(
            f"{call} of a tensor of shape {tuple(tensor.shape)} that requires grad and is stored as "
            f"{tensor.storage_layout}: functional collectives have derivatives on dense storage alone. Pass "
            "x.to_dense(), or x.detach()."
        )
    if being_traced(tensor._kept_values):
        raise MaskedSemanticsError(
            f"{call} of a tensor of shape {tuple(tensor.shape)} that is stored as {tensor.storage_layout}: how much "
            "other ranks store is not known in a graph. Pass x.to_dense(), or call it outside of the compiled region."
        )
    record = tensor.record
    return wrap_sparse(record if isinstance(record, Sparse) else tensor.clone().record)  # type: ignore[attr-defined]


def _rows_of(tensor: SparseMaskedTensor, rows: int, call: str) -> Tensor:
    """A tensor of so many rows, stored alike, to be written to."""
    _copy(tensor, call)
    parts: list[Tensor] = [tensor] * -(-rows // max(tensor.shape[0], 1)) or [tensor]
    part: Any = torch.cat(parts)[:rows]
    return wrap_sparse(part.record)
