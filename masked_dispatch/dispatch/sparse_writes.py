"""In-place writes to sparsely stored tensors, and writes from them to plain tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from masked_dispatch.autograd.dense import unwrap
from masked_dispatch.autograd.sparse import unwrap_sparse
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from op_registry import MaskedSemanticsError
from op_registry.extents.factors import with_extent
from op_registry.extents.found import in_layout
from op_registry.records.dense import Dense
from op_registry.records.validity import as_bool
from op_registry.sparse.convert import to_layout, with_sparse_dims
from op_registry.sparse.coordinates import gather, scatter_
from op_registry.sparse.on_values import align_to
from op_registry.sparse.permuted import AnyRecord, Permuted, to_dense
from op_registry.sparse.record import Sparse


def update_elements(target: Tensor, result: SparseMaskedTensor) -> Tensor:
    """Write the valid values of `result` to a plain tensor at their coordinates, without a temporary of its size."""
    record, original = unwrap_sparse(result), target
    if isinstance(record, Permuted):
        target, record = record.to_base(target), record.base
    flat, coordinates = record.flat, record.pattern.coordinates()
    values = flat.data.to(target.dtype)
    if any(step == 0 and size > 1 for step, size in zip(target.stride(), target.shape, strict=True)):
        target.copy_(values.new_zeros(()))  # raises torch's error for expanded tensors, whose elements share memory
    valid = flat.full_validity
    if valid is not None:
        values = torch.where(as_bool(valid), values, gather(target, coordinates))
    scatter_(target, coordinates, values)
    return original


def store(target: SparseMaskedTensor, source: Tensor) -> None:
    """Replace the contents of `target` by `source`, in the layout and dtype of `target`; below autograd."""
    if target._is_graph_input:
        raise MaskedSemanticsError(
            f"an in-place operation on a masked tensor of shape {tuple(target.shape)} that is stored as "
            f"{target.storage_layout} and is an argument of a compiled function: a graph cannot replace what its "
            "argument stores. Return the out-of-place result, or work on x.clone()."
        )
    layout, block = target._pattern.layout, target._pattern.block
    written = record_below(source)
    if target._order is not None and isinstance(written, Permuted) and written.order == target._order:
        written = written.base
    elif target._order is not None or isinstance(written, Permuted):
        own = target.record
        dense = written if isinstance(written, Dense) else to_dense(written)
        written = dense.map(lambda t: t.expand(target.shape))
        written = written.map(own.to_base) if isinstance(own, Permuted) else written
    if target._kept.in_place:
        store_in_place(target, written)
        return
    if isinstance(written, Sparse):
        stored = to_layout(with_sparse_dims(written, target._pattern.ndim), layout, block)
    else:
        shape = (*target._pattern.sizes, *target._kept_values.shape[target._pattern.lead :])
        whole = with_extent(written.map(lambda t: t.expand(shape)), target._extent if target._order is None else None)
        stored = in_layout(whole, layout, target._pattern.ndim, block)
    values = Dense(stored.values.data.to(target.dtype, copy=True), stored.values.validity)
    target.replace_record(target.permuted_like_self(Sparse(values, stored.pattern)))


def store_in_place(target: SparseMaskedTensor, given: Dense | Sparse) -> None:
    """Write values and validity to a tensor in shared memory, which keeps its pattern."""
    kept = target._kept
    present = Sparse(Dense(kept.values, kept.validity), kept.pattern)
    given = given.map(lambda t: t.expand(present.shape)) if isinstance(given, Dense) else given
    given = with_sparse_dims(given, present.pattern.ndim) if isinstance(given, Sparse) else given
    found = align_to(given, present)
    if _number_valid(found.map(lambda t: t.expand(kept.values.shape))) < _number_valid(given):
        raise MaskedSemanticsError(
            f"an in-place operation would store other elements in a masked tensor of shape {tuple(target.shape)} that "
            f"is stored as {target.storage_layout} and lies in shared memory: its indices cannot change there. Write "
            "only to elements that are stored (values may become invalid), write to x.clone(), or share x.to_dense()."
        )
    kept.write_in_place(found)


def _number_valid(record: Dense | Sparse) -> int:
    if isinstance(record, Sparse):
        return int(record.count(range(record.ndim)))
    validity = record.full_validity
    return record.data.numel() if validity is None else int(validity.sum(dtype=torch.int64))


def record_below(source: Tensor) -> AnyRecord:
    """The record of a tensor in any layout, without derivatives."""
    if isinstance(source, SparseMaskedTensor):
        return source.record
    return unwrap(source) if isinstance(source, MaskedTensor) else Dense(source, None)
