"""Writing by index.

Law: the written element takes the value **and the validity** of the source; an invalid index writes nothing. So the
validity is written just like the data, by the same operator. `index_fill` is elementwise instead, as `masked_fill` is:
it never revives an element, and an invalid fill value invalidates only what it fills. So a buffer that nobody has
written stays invalid; write ``buffer[index] = value``.

Writes with an invalid index go to a spare slot past the end, which is dropped afterwards.

Invalid source values are filled before they are written: for repeated indices torch does not specify which write wins.
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
    Elementwise,
    Equation,
    Number,
    Unknown,
    as_bool,
    as_int8,
    intersect,
    masked_rule,
    on_device_of,
    run_movement,
    valid_in_all,
)
from op_registry.dimensions.movements import AtIndices, Indexed
from op_registry.dimensions.views import Cut, View
from op_registry.ops.indexing.rules import (
    Indices,
    dims_of_each,
    is_boolean,
    reshape_along,
    safe_indices,
    validity_of_indices,
)
from op_registry.records.layout import full_mask, offset_within_data, validity_in_strides_of_data
from op_registry.records.tracing import under_transform

aten = torch.ops.aten

# ------------------------------------------------------------------------------------------------------- a spare slot


def with_spare_slot(target: Tensor, dim: int) -> Tensor:
    """`target` with one more slot at the end of `dim`."""
    return aten.constant_pad_nd(target, [0, 0] * (target.ndim - 1 - dim % target.ndim) + [0, 1])


def without_spare_slot(result: Tensor, dim: int, size: int) -> Tensor:
    """The first `size` slots of `dim`, contiguous like torch's result."""
    return result.narrow(dim, 0, size).contiguous()


def put_where_valid(
    target: Tensor, dim: int, index: Tensor, valid: Tensor | None, put: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """``put(target, index)``, in which writes that are not `valid` go to a spare slot past the end of `dim`.

    The index must be in range already: the spare slot would accept one that is too large by one.
    """
    if valid is None:
        return put(target, index)
    if target.ndim == 0:
        return put_where_valid(target.reshape(1), 0, index, valid, put).reshape(())
    size = target.shape[dim]
    index = torch.where(as_bool(valid), index, size)
    return without_spare_slot(put(with_spare_slot(target, dim), index), dim, size)


def assigned(x: Dense, source: Dense, put: Callable[[Tensor, Tensor], Tensor]) -> Dense:
    """``put(target, source)`` of the data and, if either is masked, of the validity alike."""
    data = put(x.data, source.filled(0))
    if x.validity is None and source.validity is None:
        return Dense(data)
    return Dense(data, put(as_int8(full_mask(x)), as_int8(full_mask(source))))


# -------------------------------------------------------------------------------------------------- index_put and put


def redirect_invalid(
    x: Dense, indices: Indices
) -> tuple[list[Tensor | None], Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Indices, the invalid ones redirected to a spare slot, and the functions that add that to a target and drop it."""
    safe = safe_indices(indices)
    integer = [i for i, index in enumerate(indices) if index is not None and not is_boolean(index)]
    valid = valid_in_all(*(indices[i] for i in integer))
    if valid is None:
        return safe, unchanged, unchanged
    aten.index(x.data.detach(), safe)  # raises where a valid index is out of range
    (dim,) = dims_of_each(indices)[integer[0]]
    size, first = x.shape[dim], safe[integer[0]]
    assert first is not None
    safe[integer[0]] = torch.where(as_bool(valid), torch.where(first < 0, first + size, first), size)
    return safe, lambda target: with_spare_slot(target, dim), lambda target: without_spare_slot(target, dim, size)


def unchanged(target: Tensor) -> Tensor:
    return target


@masked_rule(
    aten.index_put.default,
    aten._unsafe_index_put.default,
    category=ASSIGNMENT,
    takes_op=True,
    dims=AtIndices(),
)
def index_put(
    op: OpOverload, x: Dense, indices: Indices, values: Dense, accumulate: bool = False, unsafe: bool | None = None
) -> Dense:
    """Every form of index_put: assignment, or the sum of valid contributions and self where it is valid."""
    safe, add_slot, drop_slot = redirect_invalid(x, indices)
    options = () if unsafe is None else (unsafe,)  # only _index_put_impl has it
    chosen = chosen_by(safe, x.data) if values.data.numel() == 1 and not accumulate and under_transform() else None

    def put(target: Tensor, source: Tensor) -> Tensor:
        if chosen is not None:
            return torch.where(chosen, source.reshape(()), target)
        return drop_slot(op(add_slot(target), safe, source, accumulate, *options))

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


_index_put_impl = masked_rule(aten._index_put_impl.default, category=ASSIGNMENT, takes_op=True, dims=AtIndices())(
    index_put.run
)


def chosen_by(indices: Sequence[Tensor | None], target: Tensor) -> Tensor | None:
    """A single boolean index as a mask that broadcasts to `target`; None for any other indices.

    With such a mask the rule can select elements. vmap can batch that, but not an index_put whose number of writes
    depends on data.
    """
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) != 1 or given[0][1].dtype not in (torch.bool, torch.uint8):
        return None
    ((dim, index),) = given
    if index.shape != target.shape[dim : dim + index.ndim]:
        return None
    return as_bool(index).reshape(*index.shape, *[1] * (target.ndim - dim - index.ndim))


def ones_or(validity: Tensor | None, data: Tensor) -> Tensor:
    """The validity, or a 1 that broadcasts, on the device of `data`."""
    return data.new_ones((), dtype=torch.int8) if validity is None else validity


@masked_rule(
    aten._unsafe_masked_index_put_accumulate.default,
    category=ACCUMULATION,
    dims=Unknown("positions come in lists or as masks, in as many dimensions"),
)
def _unsafe_masked_index_put_accumulate(x: Dense, mask: Dense, indices: Indices, values: Dense) -> Dense:
    """Add `values` at the indices where `mask` is True (an invalid entry of it adds nothing)."""
    op, safe = aten._unsafe_masked_index_put_accumulate, safe_indices(indices)
    selected, index_validity = mask.filled(False), validity_of_indices(indices, values.ndim)
    if index_validity is not None:
        selected = selected & as_bool(index_validity)
    data = op(x.filled(0), selected, safe, values.filled(0))
    if x.validity is None:
        return Dense(data)
    contributions = op(full_mask(x).to(torch.int32), selected, safe, full_mask(values).to(torch.int32))
    return Dense(data, as_int8(contributions > 0))


@masked_rule(aten.put.default, category=ASSIGNMENT, torch_if_valid=True, dims=Equation("*,?,?->*", indexed="*"))
def put(x: Dense, index: Dense, source: Dense, accumulate: bool = False) -> Dense:
    flat, values = x.map(lambda t: t.reshape(-1)), source.map(lambda t: t.reshape(index.shape))
    return index_put.run(aten.index_put.default, flat, [index], values, accumulate).map(lambda t: t.reshape(x.shape))


# -------------------------------------------------------------------------------------------------- along a dimension


@masked_rule(aten.index_copy.default, category=ASSIGNMENT, dims=Indexed(writes=True))
def index_copy(x: Dense, dim: int, index: Dense, source: Dense) -> Dense:
    safe = checked_index(x, dim, index)

    def put(target: Tensor, values: Tensor) -> Tensor:
        return put_where_valid(target, dim, safe, index.full_validity, lambda t, i: aten.index_copy(t, dim, i, values))

    return assigned(x, source, put)


@index_copy.samples
def some_rows(make: Callable[..., Tensor]) -> list[tuple[Any, ...]]:
    """torch's own samples overwrite everything."""
    return [(make((3, 4)), 0, torch.tensor([2, 0]), make((2, 4)))]


def checked_index(x: Dense, dim: int, index: Dense) -> Tensor:
    """A 1-d index with 0 where it is invalid; raises torch's error where a valid entry is out of range."""
    safe = index.filled(0)
    if index.validity is not None:
        aten.index_select(x.data.detach(), dim, safe)
    return safe


@masked_rule(
    aten.index_fill.int_Scalar,
    aten.index_fill.int_Tensor,
    category=ELEMENTWISE,
    takes_op=True,
    dims=Indexed(writes=True),
)
def index_fill(op: OpOverload, x: Dense, dim: int, index: Dense, value: Number | Dense) -> Dense:
    safe, index_validity = index.filled(0), index.full_validity
    if index_validity is None and (not isinstance(value, Dense) or value.validity is None):
        return x.like(op(x.data, dim, safe, value.data if isinstance(value, Dense) else value))
    not_filled = x.data.new_ones(x.shape[dim] if x.ndim else 1, dtype=torch.int8)
    if index_validity is not None:
        aten.index_fill(not_filled, 0, safe.reshape(-1), 0)  # raises where a valid index is out of range
        safe = torch.where(safe < 0, safe + not_filled.shape[0], safe)
    number = value.data if isinstance(value, Dense) else value
    data = put_where_valid(x.data, dim, safe, index_validity, lambda t, i: op(t, dim, i, number))
    if not isinstance(value, Dense) or value.validity is None:
        return x.like(data)
    # An invalid value invalidates what it fills; a valid one never revives.
    not_filled = put_where_valid(
        not_filled, 0, safe.reshape(-1), index_validity, lambda t, i: aten.index_fill(t, 0, i, 0)
    )
    unaffected = reshape_along(not_filled, dim, x.ndim)
    assert unaffected is not None
    return Dense(data, intersect(x.validity, unaffected | as_int8(value.validity)))


# ----------------------------------------------------------------------------------------- a view of it, or all of it


def _scattered(op: OpOverload, x: Dense, source: Dense, *args: Any, **kwargs: Any) -> Dense:
    """A copy of `x` in which the view that the operator names is overwritten by `source`."""
    return run_movement(op, x, source, *args, **kwargs)


select_scatter = masked_rule(aten.select_scatter.default, category=ASSIGNMENT, takes_op=True, dims=Cut(index="index"))(
    _scattered
)
slice_scatter = masked_rule(
    aten.slice_scatter.default, category=ASSIGNMENT, takes_op=True, dims=Cut(start="start", stop="end", step="step")
)(_scattered)
diagonal_scatter = masked_rule(aten.diagonal_scatter.default, category=ASSIGNMENT, takes_op=True, dims=View())(
    _scattered
)


@masked_rule(aten.as_strided_scatter.default, category=ASSIGNMENT, dims=Unknown("it writes memory, not dimensions"))
def as_strided_scatter(
    x: Dense, source: Dense, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Dense:
    data = aten.as_strided_scatter(x.data, source.data, size, stride, storage_offset)
    if x.validity is None and source.validity is None:
        return Dense(data)
    written = as_int8(full_mask(source))
    offset = offset_within_data(x, storage_offset)
    v = validity_in_strides_of_data(x, size, stride, storage_offset)
    return Dense(data, aten.as_strided_scatter(v, written, size, stride, offset))


@masked_rule(aten.copy.default, category=ASSIGNMENT, dims=Elementwise())
def copy(x: Dense, source: Dense, non_blocking: bool = False) -> Dense:
    data = source.data.to(x.device, x.dtype, non_blocking=non_blocking).expand(x.shape)
    # torch.copy never returns an alias of the source.
    return Dense(data.clone(memory_format=torch.contiguous_format), on_device_of(data, source.validity))


@masked_rule(
    aten.masked_scatter.default,
    category=ASSIGNMENT,
    dims=Equation("*,*,?->*", indexed="*"),
)
def masked_scatter(x: Dense, mask: Dense, source: Dense) -> Dense:
    """The elements of `source`, in order, where `mask` is True; an invalid entry of it consumes none."""
    selected = mask.filled(False)
    return assigned(x, source, lambda target, values: aten.masked_scatter(target, selected, values))
