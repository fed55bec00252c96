"""Slice operators on sparse records: reductions, scans, softmax, sorts.

Law: each result depends on the valid elements of one slice, and all of those are stored. A rule can run on them in
three ways, tried in the order that a category or a rule states:

    by_segments       sums and extrema by segment (segments.py): one pass, regardless of the slices' lengths
    ON_DENSE_DIMS     the dense rule on the values, if only dense dimensions are concerned
    ON_PADDED_ROWS    the dense rule on padded rows, the stored elements of each slice side by side (padded_rows.py)

The last two rely on the operator's :class:`~op_registry.rule.Slices`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from op_registry.dimensions import Slices
from op_registry.records.dense import Dense, map_tensors
from op_registry.records.dims import Dims, known_to_hold, shape_alone, wrap_dims
from op_registry.rule import Rule
from op_registry.sparse.elementwise import records_among
from op_registry.sparse.lowering import ForRule, first_of
from op_registry.sparse.padded_rows import PaddedRows
from op_registry.sparse.record import NotLowered, Sparse, from_coordinates
from op_registry.sparse.segments import Segments

# What the rule of a slice operator returns.
Result = Dense | tuple[Dense, ...]


@dataclass(frozen=True)
class SliceCall:
    """A call of a slice operator on one sparse record, its arguments bound by the schema.

    dim     the dimensions as the caller passed them: a number, a list, or None for all
    dims    the same dimensions, non-negative
    named   the other arguments by name
    """

    rule: Rule
    op: OpOverload
    slices: Slices
    x: Sparse
    dim: Dims
    dims: tuple[int, ...]
    named: dict[str, Any]

    @property
    def along(self) -> tuple[int, ...]:
        """The sparse dimensions among `dims`."""
        return tuple(d for d in self.dims if d < self.x.pattern.ndim)

    def inside(self, lead: int) -> list[int]:
        """The dense dimensions among `dims`, as dimensions of values with `lead` dimensions before the dense ones."""
        return [d - self.x.pattern.ndim + lead for d in self.dims if d >= self.x.pattern.ndim]

    @property
    def keepdim(self) -> bool:
        return bool(self.named.get(self.slices.keepdim, False))

    @property
    def number(self) -> int | None:
        """The number of elements that a slice needs at least, if an argument states one (topk's k)."""
        return None if self.slices.number is None else int(self.named[self.slices.number])

    def run(self, record: Dense, dim: Dims) -> Any:
        """The rule on a dense record, over its dimensions `dim`."""
        named = dict(self.named)
        if any(argument.name == self.slices.dim for argument in self.op._schema.arguments):
            named[str(self.slices.dim)] = dim
        return self.rule.bind(self.op)(record, **named)


def slice_call(rule: Rule, op: OpOverload, *args: Any, **kwargs: Any) -> SliceCall:
    """A call as :class:`SliceCall`; NotLowered if it is not one, torch's error for a dimension out of range."""
    slices = rule.slices
    if slices is None:
        raise NotLowered("no form of it for sparse storage is written (in its rule: dims=Slices(…), or a lowering)")
    names = [a.name for a in op._schema.arguments]
    named = dict(zip(names, args, strict=False)) | kwargs
    x = named.pop(names[0])
    others = records_among(list(named.values()))
    if not isinstance(x, Sparse) or any(isinstance(r, Sparse) for r in others):
        raise NotLowered("only the first operand may be sparse")
    if any(r.ndim > 0 for r in others):
        raise NotLowered("another operand is dense")
    if 0 in x.shape:
        raise NotLowered("its input is empty")  # results of empty slices are torch's, computed densely
    dim = _pop_dim(op, slices, named)
    if dim == [] and slices.none_for_no_dims:
        raise NotLowered("an empty list of dimensions reduces nothing")
    bound = max(x.ndim, 1)
    for d in () if dim is None else (dim,) if isinstance(dim, int) else dim:
        if not -bound <= d < bound:
            shape_alone(x.shape).squeeze(d)  # raises torch's own error
    if slices.needs_elements and known_to_hold(x.values.data.numel() == 0):
        raise NotLowered("torch refuses input without elements, and nothing is stored")
    return SliceCall(rule, op, slices, x, dim, wrap_dims(dim, x.ndim), named)


def _pop_dim(op: OpOverload, slices: Slices, named: dict[str, Any]) -> Dims:
    for argument in op._schema.arguments:
        if argument.name == slices.dim:
            dim: Dims = named.pop(argument.name, argument.default_value if argument.has_default_value() else None)
            return dim
    return None


# ---------------------------------------------------------------------------------------------------- on the values


def on_dense_dims(rule: Rule, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """The rule on the values, for slices that run over dense dimensions only."""
    call = slice_call(rule, op, *args, **kwargs)
    if call.along:
        raise NotLowered("it works along sparse dimensions")
    inside = call.inside(call.x.pattern.lead)
    result = call.run(call.x.values, inside[0] if isinstance(call.dim, int) else inside)
    return map_tensors(call.x.like, result, Dense)


# ------------------------------------------------------------------------------------------------------ by segments


def by_segments(function: Callable[..., Any]) -> ForRule:
    """A lowering by segments, from ``function(over, x, op, **options)``.

    over     the slices, as :class:`Segments`
    x        the stored values in storage order, a dense record
    options  the operator's arguments by name, except those that state the dimensions
    """

    def run(rule: Rule, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
        call = slice_call(rule, op, *args, **kwargs)
        if not call.along:
            raise NotLowered("it works along dense dimensions")
        x, options = call.x, {k: v for k, v in call.named.items() if k != "keepdim"}
        of_elements = call.slices.gives != "one"
        over = Segments(x, call.along, call.inside(1), occupied=of_elements)
        result = function(over, x.flat, op, **options)
        if of_elements:
            return map_tensors(x.folded, result, Dense)
        keepdim_shape = [1 if d in call.dims else size for d, size in enumerate(x.shape)]
        shape = keepdim_shape if call.keepdim else [size for d, size in enumerate(x.shape) if d not in call.dims]
        return _reshaped(result, lambda _: shape)

    return ForRule(run)


# --------------------------------------------------------------------------------------------------- on padded rows


def on_padded_rows(rule: Rule, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """The rule on padded rows, with its results moved back to the coordinates of the elements."""
    call = slice_call(rule, op, *args, **kwargs)
    x, slices, number = call.x, call.slices, call.number
    if not call.along:
        raise NotLowered("it works along dense dimensions")
    if number is not None and number > math.prod(x.shape[d] for d in call.dims):
        raise NotLowered(f"torch refuses a {slices.number} that is greater than the slice")
    rows = PaddedRows(x, call.along, at_least=max(1, number or 1), occupied=slices.gives != "one")
    record = rows.pad(x.flat)
    if slices.gives == "one" and not isinstance(call.dim, int) and len(call.dims) == x.ndim:
        return _over_all_elements(call, rows, record)
    result = call.run(record, 1 if isinstance(call.dim, int) else [1, *call.inside(2)])
    result = _map_results(result, slices.positions, lambda r: _positions_in_slice(r, rows))
    if slices.gives != "one":
        return map_tensors(lambda r: _to_sparse(r, rows, call), result, Dense)
    return _reshaped(result, lambda shape: _reduced_shape(shape, rows, call))


def _over_all_elements(call: SliceCall, rows: PaddedRows, record: Dense) -> Any:
    single_row = record.map(lambda t: t.squeeze(0))
    result = call.run(single_row, None if call.dim is None else list(range(single_row.ndim)))
    result = _map_results(result, call.slices.positions, lambda r: _positions_in_tensor(r, rows, call.x))

    def reduced(shape: torch.Size) -> Sequence[int]:
        if call.keepdim:
            return (1,) * call.x.ndim
        return shape[1:] if shape[:1] == (0,) else shape

    return _reshaped(result, reduced)


def _map_results(result: Result, indices: Sequence[int], change: Callable[[Dense], Dense]) -> Result:
    """`change` applied to the results at `indices`."""
    if isinstance(result, Dense):
        return change(result) if 0 in indices else result
    return tuple(change(r) if n in indices else r for n, r in enumerate(result))


def _reshaped(result: Result, shape_of: Callable[[torch.Size], Sequence[int]]) -> Any:
    return map_tensors(lambda r: r.map(lambda t: t.reshape(tuple(shape_of(t.shape)))), result, Dense)


def _reduced_shape(shape: torch.Size, rows: PaddedRows, call: SliceCall) -> tuple[int, ...]:
    if not call.keepdim:
        return (*rows.sizes, *shape[1:])
    return (*(1 if d in call.along else size for d, size in enumerate(call.x.pattern.sizes)), *shape[2:])


def _positions_in_slice(result: Dense, rows: PaddedRows) -> Dense:
    """Positions in a padded row converted to positions in the original slice."""
    position = result.data.clamp(0, rows.width - 1)
    flat = position.reshape(rows.slices, -1)
    return result.like(rows.positions_in_slice().gather(1, flat).reshape(result.shape))


def _positions_in_tensor(result: Dense, rows: PaddedRows, x: Sparse) -> Dense:
    """Positions among all stored elements converted to positions in the flattened tensor."""
    inner_numel = math.prod(x.dense_sizes)
    slot, inner = result.data // inner_numel, result.data % inner_numel
    positions = rows.positions_in_slice()[0]
    return result.like(positions[slot.clamp(0, rows.width - 1)] * inner_numel + inner)


def _to_sparse(r: Dense, rows: PaddedRows, call: SliceCall) -> Sparse:
    """Padded rows of results as a sparse record: at their coordinates, or in order at the front of the slice."""
    x, along = call.x, call.along
    if call.slices.gives == "each":
        return x.folded(rows.unpad(r))
    if len(along) != 1:
        raise NotLowered("it sorts along one dimension only")
    width = r.shape[1]
    slots = rows.slots if width == rows.width else None
    if slots is None:
        row, column = rows.slots // rows.width, rows.slots % rows.width
        slots = (row * width + column)[column < width]
    column = slots % width
    others = iter(rows.slice_of(slots // width))
    coordinates = tuple(column if d == along[0] else next(others) for d in range(x.pattern.ndim))
    sizes = list(x.pattern.sizes)
    if call.number is not None:
        sizes[along[0]] = width
    flat = r.map(lambda t: t.reshape(-1, *t.shape[2:])[slots])
    return from_coordinates(x.pattern.layout.exact_sibling, coordinates, flat, sizes)


ON_DENSE_DIMS, ON_PADDED_ROWS = ForRule(on_dense_dims), ForRule(on_padded_rows)
SLICEWISE = first_of(ON_DENSE_DIMS, ON_PADDED_ROWS)


def lowers_by_segments(*rules: Rule) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the lowering of rules by segments, tried before the dense rule on values and on padded rows."""

    def decorator(function: Callable[..., Any]) -> Callable[..., Any]:
        for rule in rules:
            rule.lowering(Sparse)(first_of(by_segments(function), SLICEWISE))
        return function

    return decorator
