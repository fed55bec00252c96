"""The operators behind masked_dispatch/api/sparsify.py: select elements and store them in a requested layout."""

from __future__ import annotations

import torch
from torch import Tensor

from masked_dispatch.autograd.sparse import in_stored_order, unwrap_any, wrap_any
from masked_dispatch.densify_policy import check_allowed
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from op_registry.extents.factors import with_extent
from op_registry.extents.writes import extent_under
from op_registry.records.dense import Dense
from op_registry.records.dims import shape_alone
from op_registry.records.validity import as_int8, intersect
from op_registry.sparse.convert import (
    from_coordinates,
    from_dense,
    lookup,
    to_layout,
    valid_elements_of,
    without_invalid,
)
from op_registry.sparse.layout import layout_named
from op_registry.sparse.on_values import align_to, call
from op_registry.sparse.permuted import to_dense
from op_registry.sparse.record import NotLowered, Sparse

aten = torch.ops.aten


def keep_where(
    tensor: Tensor, condition: Tensor, layout: str, sparse_dim: int | None, block: list[int] | None
) -> MaskedTensor:
    """The valid elements of `tensor` for which `condition` is True and valid."""
    record, selected = unwrap_any(tensor), unwrap_any(condition)
    torch.broadcast_to(shape_alone(selected.shape), record.shape)  # raises torch's own error
    if selected.shape != record.shape and isinstance(condition, MaskedTensor):
        condition._check_no_extent("sparse_where, which broadcasts it,")
    extent = extent_under(record, selected)
    wanted, size = layout_named(layout), None if block is None else (block[0], block[1])
    if isinstance(record, Sparse) and record.pattern.ndim == (record.ndim if sparse_dim is None else sparse_dim):
        aligned = align_to(in_stored_order("sparse_where", condition, selected), record)
        mask = as_int8(aligned.data) if aligned.validity is None else as_int8(aligned.filled(False))
        values = record.values.masked_by(mask.reshape(mask.shape + (1,) * (record.values.ndim - mask.ndim)))
        elements = to_layout(record.like(values), record.pattern.layout.exact_sibling)
        return wrap_any(with_extent(to_layout(without_invalid(elements), wanted, size), extent))
    sparse = [t for t in (tensor, condition) if isinstance(t, SparseMaskedTensor)]
    if sparse:
        check_allowed("sparse_where", sparse, "its operands do not have the sparse dimensions of the result")
    dense = to_dense(record)
    mask = as_int8(to_dense(selected).filled(False)).expand(dense.shape)
    kept = Dense(dense.data, intersect(dense.validity, mask))
    return wrap_any(with_extent(from_dense(kept, wanted, sparse_dim, size), extent))


def keep_top(tensor: Tensor, k: int, dim: int, largest: bool, layout: str, block: list[int] | None) -> MaskedTensor:
    """The k largest or smallest elements of each slice, at the indices that topk returns."""
    record = unwrap_any(tensor)
    x = in_stored_order("sparse_topk", tensor, record)
    try:
        _, index = call(aten.topk.default, x, k, dim, largest, True)
    except NotLowered as reason:
        assert isinstance(tensor, SparseMaskedTensor)
        check_allowed("sparse_topk", [tensor], str(reason))
        x = to_dense(x)
        _, index = call(aten.topk.default, x, k, dim, largest, True)
    flat, coordinates = valid_elements_of(index)
    coordinates = tuple(
        flat.filled(0).to(torch.int64) if d == dim % x.ndim else along for d, along in enumerate(coordinates)
    )
    values = lookup(x, coordinates).masked_by(flat.full_validity)
    wanted = layout_named(layout)
    elements = from_coordinates(wanted.exact_sibling, coordinates, values, tuple(x.shape))
    stored = to_layout(elements, wanted, None if block is None else (block[0], block[1]))
    return wrap_any(with_extent(stored, extent_under(record)))
