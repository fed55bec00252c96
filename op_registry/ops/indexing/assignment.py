"""Writing by index.

Law: the written element takes the value **and the validity** of what is written; an invalid index writes nothing. So
the validity is written as the data is, by the same operator. (`index_fill` is elementwise instead: it never revives,
and an invalid fill value counts only where it is written.) What must be written nowhere is sent to a spare place past
the end, which is cut off afterwards.

Values that are written and invalid are filled first: with an index that repeats, torch does not say which write wins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    ACCUMULATION,
    ASSIGNMENT,
    ELEMENTWISE,
    Dense,
    Number,
    as_bool,
    as_int8,
    full_mask,
    intersect,
    masked_rule,
    offset_within_data,
    on_device_of,
    opaque,
    run_movement,
    valid_in_all,
    validity_in_strides_of_data,
)
from op_registry.ops.indexing.rules import Indices, along, dims_of_each, is_boolean, safe_indices, validity_of_indices

aten = torch.ops.aten

# ------------------------------------------------------------------------------------------------- a spare place


def with_spare_place(target: Tensor, dim: int) -> Tensor:
    """`target` with one more place at the end of `dim`."""
    room: Tensor = aten.constant_pad_nd(target, [0, 0] * (target.ndim - 1 - dim % target.ndim) + [0, 1])
    return room


def without_spare_place(result: Tensor, dim: int, size: int) -> Tensor:
    """The first `size` places of `result`, contiguous as torch's own result is."""
    return result.narrow(dim, 0, size).contiguous()


def put_where_kept(
    target: Tensor, dim: int, index: Tensor, kept: Tensor | None, put: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """``put(target, index)``, where what is not `kept` lands in a spare place past the end of `dim`.

    The index has to be in range already: the spare place would take in one that is too large by one.
    """
    if kept is None:
        return put(target, index)
    if target.ndim == 0:
        return put_where_kept(target.reshape(1), 0, index, kept, put).reshape(())
    size = target.shape[dim]
    index = torch.where(as_bool(kept), index, size)
    return without_spare_place(put(with_spare_place(target, dim), index), dim, size)


# ---------------------------------------------------------------------------------------------- index_put and put


def with_places(
    x: Dense, indices: Indices
) -> tuple[list[Tensor | None], Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Indices to write at, and what to do to the target before and after: make room for the writes that are none."""
    where = safe_indices(indices)
    integer = [i for i, index in enumerate(indices) if index is not None and not is_boolean(index)]
    kept = valid_in_all(*(indices[i] for i in integer))
    if kept is None:
        return where, unchanged, unchanged
    aten.index(x.data.detach(), where)  # raises where a valid index is out of range
    (dim,) = dims_of_each(indices)[integer[0]]
    size, first = x.shape[dim], where[integer[0]]
    assert first is not None
    where[integer[0]] = torch.where(as_bool(kept), torch.where(first < 0, first + size, first), size)
    return where, lambda target: with_spare_place(target, dim), lambda target: without_spare_place(target, dim, size)


def unchanged(target: Tensor) -> Tensor:
    return target


def write(op: OpOverload, x: Dense, indices: Indices, values: Dense, accumulate: bool, *options: bool) -> Dense:
    """index_put in any of its forms: assignment, or the sum of the valid contributions and of self where valid."""
    where, before, after = with_places(x, indices)

    def put(target: Tensor, source: Tensor) -> Tensor:
        return after(op(before(target), where, source, accumulate, *options))

    if accumulate:
        data = put(x.filled(0), values.filled(0))
        if x.validity is None:
            return Dense(data)
        contributions = put(full_mask(x).to(torch.int32), ones_or(values.validity, values.data).to(torch.int32))
        return Dense(data, as_int8(contributions > 0))
    data = put(x.data, values.filled(0))
    if x.validity is None and values.validity is None:
        return Dense(data)
    return Dense(data, put(as_int8(full_mask(x)), as_int8(ones_or(values.validity, values.data))))


def ones_or(validity: Tensor | None, data: Tensor) -> Tensor:
    """A validity, or a single one that broadcasts, beside `data`."""
    return data.new_ones((), dtype=torch.int8) if validity is None else validity


@masked_rule(aten.index_put.default, aten._unsafe_index_put.default, category=ASSIGNMENT, takes_op=True)
def index_put(op: OpOverload, x: Dense, indices: Indices, values: Dense, accumulate: bool = False) -> Dense:
    return write(op, x, indices, values, accumulate)


@masked_rule(aten._index_put_impl.default, category=ASSIGNMENT, takes_op=True)
def _index_put_impl(
    op: OpOverload, x: Dense, indices: Indices, values: Dense, accumulate: bool = False, unsafe: bool = False
) -> Dense:
    return write(op, x, indices, values, accumulate, unsafe)


@masked_rule(aten._unsafe_masked_index_put_accumulate.default, category=ACCUMULATION)
def _unsafe_masked_index_put_accumulate(x: Dense, mask: Dense, indices: Indices, values: Dense) -> Dense:
    """Adds `values` at the indices where `mask` is True (an invalid entry of it adds nothing)."""
    op, where = aten._unsafe_masked_index_put_accumulate, safe_indices(indices)
    chosen, read = mask.filled(False), validity_of_indices(indices, values.ndim)
    if read is not None:
        chosen = chosen & as_bool(read)
    data = op(x.filled(0), chosen, where, values.filled(0))
    if x.validity is None:
        return Dense(data)
    contributions = op(full_mask(x).to(torch.int32), chosen, where, full_mask(values).to(torch.int32))
    return Dense(data, as_int8(contributions > 0))


@masked_rule(aten.put.default, category=ASSIGNMENT)
def put(x: Dense, index: Dense, source: Dense, accumulate: bool = False) -> Dense:
    if x.validity is None and index.validity is None and source.validity is None:
        return Dense(aten.put(x.data, index.data, source.data, accumulate))
    flat, values = x.map(_flattened), source.map(lambda t: t.reshape(index.shape))
    return write(aten.index_put.default, flat, [index], values, accumulate).map(lambda t: t.reshape(x.shape))


def _flattened(t: Tensor) -> Tensor:
    return t.reshape(-1)


# ------------------------------------------------------------------------------------------------- along a dimension


@masked_rule(aten.index_copy.default, category=ASSIGNMENT)
def index_copy(x: Dense, dim: int, index: Dense, source: Dense) -> Dense:
    where = checked_index(x, dim, index)

    def put(target: Tensor, values: Tensor) -> Tensor:
        return put_where_kept(target, dim, where, index.full_validity, lambda t, i: aten.index_copy(t, dim, i, values))

    data = put(x.data, source.filled(0))
    if x.validity is None and source.validity is None:
        return Dense(data)
    return Dense(data, put(as_int8(full_mask(x)), as_int8(full_mask(source))))


def checked_index(x: Dense, dim: int, index: Dense) -> Tensor:
    """A 1-d index as torch may read it; raises as torch does where a valid entry is out of range."""
    where = index.filled(0)
    if index.validity is not None:
        aten.index_select(x.data.detach(), dim, where)
    return where


@masked_rule(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor, category=ELEMENTWISE, takes_op=True)
def index_fill(op: OpOverload, x: Dense, dim: int, index: Dense, value: Number | Dense) -> Dense:
    where, kept = index.filled(0), index.full_validity
    if kept is None and (not isinstance(value, Dense) or value.validity is None):
        return x.like(op(x.data, dim, where, value.data if isinstance(value, Dense) else value))
    line = x.data.new_ones(x.shape[dim] if x.ndim else 1, dtype=torch.int8)
    if kept is not None:
        aten.index_fill(line, 0, where.reshape(-1), 0)  # raises where a valid index is out of range
        where = torch.where(where < 0, where + line.shape[0], where)
    number = value.data if isinstance(value, Dense) else value
    data = put_where_kept(x.data, dim, where, kept, lambda t, i: op(t, dim, i, number))
    if not isinstance(value, Dense) or value.validity is None:
        return x.like(data)
    # An invalid value takes away validity where it is written, and gives none.
    line = put_where_kept(line, 0, where.reshape(-1), kept, lambda t, i: aten.index_fill(t, 0, i, 0))
    unharmed = along(line, dim, x.ndim)
    assert unharmed is not None
    return Dense(data, intersect(x.validity, unharmed | as_int8(value.validity)))


# --------------------------------------------------------------------------------------------- into a view, or whole


@masked_rule(
    aten.select_scatter.default,
    aten.slice_scatter.default,
    aten.diagonal_scatter.default,
    category=ASSIGNMENT,
    takes_op=True,
)
def select_scatter(op: OpOverload, x: Dense, source: Dense, *args: Any, **kwargs: Any) -> Dense:
    """The copy of `x` in which a view of it has been written over by `source`."""
    result: Dense = run_movement(op, x, source, *args, **kwargs)
    return result


@masked_rule(aten.as_strided_scatter.default, category=ASSIGNMENT)
def as_strided_scatter(
    x: Dense, source: Dense, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Dense:
    data = aten.as_strided_scatter(x.data, source.data, size, stride, storage_offset)
    if x.validity is None and source.validity is None:
        return Dense(data)
    written = as_int8(full_mask(source))
    offset = offset_within_data(x, storage_offset)
    return Dense(data, aten.as_strided_scatter(validity_in_strides_of_data(x), written, size, stride, offset))


@masked_rule(aten.copy.default, category=ASSIGNMENT)
def copy(x: Dense, source: Dense, non_blocking: bool = False) -> Dense:
    data = source.data.to(x.device, x.dtype, non_blocking=non_blocking).expand(x.shape)
    # A copy, and never the source itself.
    return Dense(data.clone(memory_format=torch.contiguous_format), on_device_of(data, source.validity))


masked_scatter = opaque(aten.masked_scatter.default)
