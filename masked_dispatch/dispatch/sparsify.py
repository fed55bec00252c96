"""The operators behind producers.py: what is kept of a record, in the storage that was asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from masked_dispatch.autograd.sparse import unwrap_any, wrap_sparse_record
from masked_dispatch.densify_policy import check_allowed
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from op_registry.records.dense import Dense
from op_registry.records.validity import as_int8, intersect
from op_registry.sparse.compose import call
from op_registry.sparse.elements import lookup, valid_elements_of
from op_registry.sparse.elementwise import align_to
from op_registry.sparse.layout import layout_named
from op_registry.sparse.permuted import Permuted, to_dense
from op_registry.sparse.record import (
    NotLowered,
    Sparse,
    from_coordinates,
    from_dense,
    to_layout,
    without_invalid,
)

aten = torch.ops.aten


def keep_where(
    tensor: Tensor, condition: Tensor, layout: str, sparse_dim: int | None, block: list[int] | None
) -> MaskedTensor:
    """What is valid and meets the condition."""
    record, asked = unwrap_any(tensor), unwrap_any(condition)
    torch.broadcast_to(torch.empty(asked.shape, device="meta"), record.shape)  # raises torch's own error
    wanted, size = layout_named(layout), None if block is None else (block[0], block[1])
    if isinstance(record, Sparse) and record.pattern.ndim == (record.ndim if sparse_dim is None else sparse_dim):
        there = align_to(asked if not isinstance(asked, Permuted) else to_dense(asked), record)
        met = as_int8(there.data) if there.validity is None else as_int8(there.filled(False))
        kept = record.values.masked_by(met.reshape(met.shape + (1,) * (record.values.ndim - met.ndim)))
        plain = to_layout(record.like(kept), record.pattern.layout.exact_sibling)
        return wrap_sparse_record(to_layout(without_invalid(plain), wanted, size))
    whole, mask = to_dense(record), to_dense(asked)
    chosen = as_int8(mask.filled(False)).expand(whole.shape)
    return wrap_sparse_record(
        from_dense(Dense(whole.data, intersect(whole.validity, chosen)), wanted, sparse_dim, size)
    )


def keep_top(tensor: Tensor, k: int, dim: int, largest: bool, layout: str, block: list[int] | None) -> MaskedTensor:
    """The k greatest or least of each slice, at the positions that topk gives."""
    record = unwrap_any(tensor)
    x = to_dense(record) if isinstance(record, Permuted) else record
    try:
        _, index = call(aten.topk.default, x, k, dim, largest, True)
    except NotLowered as reason:
        assert isinstance(tensor, SparseMaskedTensor)
        check_allowed("sparse_topk", [tensor], str(reason))
        x = to_dense(x)
        _, index = call(aten.topk.default, x, k, dim, largest, True)
    flat, places = valid_elements_of(index)
    at = [flat.filled(0).to(torch.int64) if d == dim % x.ndim else p for d, p in enumerate(places)]
    found = lookup(x, at).masked_by(flat.full_validity)
    wanted = layout_named(layout)
    kept = from_coordinates(wanted.exact_sibling, tuple(at), found, tuple(x.shape))
    return wrap_sparse_record(to_layout(kept, wanted, None if block is None else (block[0], block[1])))
