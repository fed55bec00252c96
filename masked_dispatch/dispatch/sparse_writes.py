"""Writing to and from sparse storage."""

from __future__ import annotations

import torch
from torch import Tensor

from masked_dispatch.autograd.dense import unwrap
from masked_dispatch.autograd.sparse import unwrap_sparse
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from op_registry import MaskedSemanticsError
from op_registry.records.dense import Dense
from op_registry.records.validity import as_bool
from op_registry.sparse.gather_scatter import gather, scatter_
from op_registry.sparse.permuted import AnyRecord, Permuted, to_dense
from op_registry.sparse.record import Sparse, from_dense, to_layout, with_sparse_dims


def update_elements(target: Tensor, result: SparseMaskedTensor) -> Tensor:
    """A plain tensor takes the valid values of `result` in their places; nothing of its size is made."""
    record, written = unwrap_sparse(result), target
    if isinstance(record, Permuted):
        target, record = target.permute(record.back), record.base
    flat, places = record.flat, record.pattern.places()
    values = flat.data.to(target.dtype)
    if any(step == 0 and size > 1 for step, size in zip(target.stride(), target.shape, strict=True)):
        target.copy_(values.new_zeros(()))  # raises torch's own error: several of its elements are one
    valid = flat.full_validity
    if valid is not None:
        values = torch.where(as_bool(valid), values, gather(target, places))
    scatter_(target, places, values)
    return written


def store(target: SparseMaskedTensor, source: Tensor) -> None:
    """Let `target` store what `source` holds, in its own layout and dtype, below autograd."""
    if target._is_graph_input:
        raise MaskedSemanticsError(
            f"an in-place operation on a masked tensor of shape {tuple(target.shape)} that is stored as "
            f"{target.storage_layout} and was given to a compiled function: a graph cannot exchange what its argument "
            "stores. Return the out-of-place result, or work on x.clone()."
        )
    layout, block = target._pattern.layout, target._pattern.block
    given = open_below(source)
    if target._order is not None and isinstance(given, Permuted) and given.order == target._order:
        given = given.base
    elif target._order is not None or isinstance(given, Permuted):
        back = sorted(range(target.ndim), key=(target._order or range(target.ndim)).__getitem__)
        dense = given if isinstance(given, Dense) else to_dense(given)
        given = dense.map(lambda t: t.expand(target.shape).permute(back))
    if isinstance(given, Sparse):
        record = to_layout(with_sparse_dims(given, target._pattern.ndim), layout, block)
    else:
        shape = (*target._pattern.sizes, *target._kept_values.shape[target._pattern.lead :])
        record = from_dense(given.map(lambda t: t.expand(shape)), layout, target._pattern.ndim, block)
    values = record.values
    target.replace_record(
        target.seen(Sparse(Dense(values.data.to(target.dtype, copy=True), values.validity), record.pattern))
    )


def open_below(source: Tensor) -> AnyRecord:
    """What `source` holds, without derivatives."""
    if isinstance(source, SparseMaskedTensor):
        return source.record
    return unwrap(source) if isinstance(source, MaskedTensor) else Dense(source, None)
