"""Operators behind functions of masked_dispatch that select elements: what functions on plain tensors ask.

first, last, align and positions ask for positions of padded batches: in a graph, what a tensor knows of its positions
can be read inside an operator only. A tensor without an extent, a plain one too, is there everywhere: one spelling
serves a batch and a sample. sparse_where and sparse_topk select elements and store them in a requested layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from masked_dispatch.autograd.dense import wrap_record
from masked_dispatch.autograd.reached import joined
from masked_dispatch.autograd.sparse import in_stored_order, unwrap_any, wrap_any
from masked_dispatch.policies import check_allowed
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from op_registry import MaskedSemanticsError
from op_registry.dimensions.sizes import known_to_hold
from op_registry.extents import samples
from op_registry.extents.factors import with_extent
from op_registry.extents.writes import extent_under, placed_as, united_in_groups
from op_registry.records.arguments import shape_alone
from op_registry.records.dense import Dense
from op_registry.records.extent import Merged, as_positions, is_prefix
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


def ends(tensor: Tensor, dim: int, k: int, last: bool) -> Tensor:
    dim, in_order = _positions_of(tensor, dim, name := "last" if last else "first")
    empty = known_to_hold(tensor.shape[dim] == 0)
    if in_order is None:
        if empty and k:
            raise IndexError(f"{name}: a tensor of shape {tuple(tensor.shape)} has no position along dimension {dim}")
        return tensor.narrow(dim, tensor.shape[dim] - k if last else 0, k).clone()
    if isinstance(tensor, SparseMaskedTensor) and in_order and not empty:
        return tensor.flip(dim).narrow(dim, 0, k).flip(dim) if last else tensor.narrow(dim, 0, k).clone()
    record = _dense(name, tensor)
    return joined(tensor, record, wrap_record(samples.ends(record, dim, k, last)), moving="some")


def align(tensor: Tensor, dim: int) -> Tensor:
    dim, in_order = _positions_of(tensor, dim, "align")
    if in_order is not False:
        return tensor
    record = _dense("align", tensor)
    return joined(tensor, record, wrap_record(samples.compacted(record, dim)), moving="all")


def positions(tensor: Tensor, dim: int) -> Tensor:
    dim, in_order = _positions_of(tensor, dim, "positions")
    if in_order is not None:
        return wrap_record(samples.positions(unwrap_any(tensor), dim))
    count = torch.arange(tensor.shape[dim], device=tensor.device)
    return count.expand(tensor.shape[0], -1).clone() if dim else count


def _dense(operation: str, tensor: Tensor) -> Dense:
    """The record for an operation that moves each sample's positions; the policy decides if it is sparse."""
    record = unwrap_any(tensor)
    if isinstance(tensor, SparseMaskedTensor):
        check_allowed(operation, [tensor], "it moves each sample's own positions")
    return record if isinstance(record, Dense) else to_dense(record)


def _positions_of(x: Tensor, dim: int, name: str) -> tuple[int, bool | None]:
    """The dimension, and whether each sample's positions are known to be its first indices.

    None: the tensor is there everywhere.
    """
    shape = tuple(x.shape)
    extent = x._extent if isinstance(x, MaskedTensor) else None
    if extent is None or not extent.factors:
        return dim, None
    if not extent.numbers(dim):
        raise ValueError(
            f"{name}: dimension {dim} of a tensor of shape {shape} numbers no positions of its samples; these "
            f"do: {', '.join(map(str, extent.positions)) or 'none'}. masked_dispatch.padded(x, extent) says which "
            "positions are there"
        )
    known = [factor.along[dim] for factor in extent.factors]
    if any(isinstance(as_positions(along), Merged) for along in known):
        raise ValueError(
            f"{name}: dimension {dim} of a tensor of shape {shape} is merged of positions and others; "
            "split it first, x.unflatten(dim, sizes)"
        )
    return dim, all(along is None or is_prefix(along) for along in known)


def placed_like(tensor: Tensor, other: Tensor) -> Tensor:
    """The tensor, valid where it was and `other`, which broadcasts to it, is there; it has the extent of `other` too.

    Without an extent of `other`: the tensor itself, which may be plain.
    """
    record = unwrap_any(tensor)
    placed = placed_as(record, unwrap_any(other))
    return tensor if placed is record else joined(tensor, record, wrap_any(placed), moving="some")


def order_of_samples(tensor: Tensor, dim: int) -> list[Tensor]:
    """Indices that put each sample's positions in order along `dim`, and that put them back; [] where they are."""
    return list(samples.own_order(unwrap_any(tensor), dim) or ())


def places_of_groups(tensor: Tensor, dim: int, numbers: Tensor, groups: int) -> Tensor:
    """A bool tensor with the extent of a statistic of groups: element n of `dim` belongs to group `numbers[n]`.

    Each sample has all groups of its positions. A group of samples is there where one of them is.
    """
    record = unwrap_any(tensor)
    known = [f.along[dim] for f in (record.extent.factors if record.extent else ()) if dim in f.positions]
    if not known:
        return wrap_any(united_in_groups(record, dim, numbers, groups))
    if not all(map(is_prefix, known)):
        raise MaskedSemanticsError(
            f"groupby: labels count along dimension {dim} of a batch of shape {tuple(record.shape)}, whose samples are "
            f"not known to begin at index 0 there. Move them to the front, masked_dispatch.align(x, {dim}); or treat "
            "padding as missing values, x.without_extent()."
        )
    ones = Dense(torch.ones(record.shape, dtype=torch.bool, device=record.device))
    return wrap_any(placed_as(ones, record)).any(dim, keepdim=True)


# ----------------------------------------------------------------------------------------------- what to store sparsely

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
    size = None if block is None else (block[0], block[1])
    stored = from_coordinates(wanted, coordinates, values, tuple(x.shape), size)
    return wrap_any(with_extent(stored, extent_under(record)))
