"""The operators behind producers.py: what is kept of a record, in the storage that was asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from masked_dispatch.storage.boundary import closed_sparse, open_any
from masked_dispatch.storage.policy import check_allowed
from masked_dispatch.storage.wrapper import SparselyStored
from masked_dispatch.tensor import MaskedTensor
from op_registry.elementwise_lowering import values_at
from op_registry.patterns import OF_BLOCKS
from op_registry.records import Dense, as_int8, intersect
from op_registry.sparse import NotLowered, Sparse, arranged, compacted, from_dense, in_layout, unblocked
from op_registry.sparse_words import call, elements_at, listed_of
from op_registry.turned import Turned, to_dense

aten = torch.ops.aten


def keep_where(
    tensor: Tensor, condition: Tensor, layout: torch.layout, sparse_dim: int | None, block: list[int] | None
) -> MaskedTensor:
    """What is valid and meets the condition."""
    record, asked = open_any(tensor), open_any(condition)
    torch.broadcast_to(torch.empty(asked.shape, device="meta"), record.shape)  # raises torch's own error
    size = None if block is None else (block[0], block[1])
    if isinstance(record, Sparse) and record.pattern.ndim == (record.ndim if sparse_dim is None else sparse_dim):
        there = values_at(asked if not isinstance(asked, Turned) else to_dense(asked), record)
        met = as_int8(there.data) if there.validity is None else as_int8(there.filled(False))
        kept = record.values.keep(met.reshape(met.shape + (1,) * (record.values.ndim - met.ndim)))
        plain = in_layout(record.like(kept), unblocked(record.pattern.layout))
        return closed_sparse(in_layout(compacted(plain), layout, size))
    whole, mask = to_dense(record), to_dense(asked)
    chosen = as_int8(mask.filled(False)).expand(whole.shape)
    return closed_sparse(from_dense(Dense(whole.data, intersect(whole.validity, chosen)), layout, sparse_dim, size))


def keep_top(
    tensor: Tensor, k: int, dim: int, largest: bool, layout: torch.layout, block: list[int] | None
) -> MaskedTensor:
    """The k greatest or least of each slice, at the positions that topk gives."""
    record = open_any(tensor)
    x = to_dense(record) if isinstance(record, Turned) else record
    try:
        _, index = call(aten.topk.default, x, k, dim, largest, True)
    except NotLowered as reason:
        assert isinstance(tensor, SparselyStored)
        check_allowed("sparse_topk", [tensor], str(reason))
        x = to_dense(x)
        _, index = call(aten.topk.default, x, k, dim, largest, True)
    flat, places = listed_of(index)
    at = [flat.filled(0).to(torch.int64) if d == dim % x.ndim else p for d, p in enumerate(places)]
    found = elements_at(x, at).keep(flat.full_validity)
    listing = torch.sparse_coo if layout in OF_BLOCKS else layout
    kept = arranged(listing, tuple(at), found, tuple(x.shape))
    return closed_sparse(in_layout(kept, layout, None if block is None else (block[0], block[1])))
