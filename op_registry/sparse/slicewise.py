"""Slice operators on sparse records: reductions, scans, softmax, sorts.

Law: each result depends on the valid elements of one slice, which are among those that are stored. Three ways to run a
rule on them, tried in the order in which a category or a rule writes them down:

    BY_SEGMENTS   a function of sums and extrema by segment (segments.py); one pass, whatever the slices' lengths
    ON_DENSE_DIMS     the rule on the values as they lie, where only dense dimensions are concerned
    ON_PADDED_ROWS      the rule on *lines*, the stored elements of each slice side by side (lines.py)

What the last two have to know of an operator is said by its :class:`~op_registry.rule.Slices`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from op_registry.records.dense import Dense, map_tensors
from op_registry.records.dims import wrap_dims
from op_registry.rule import Rule, Slices
from op_registry.sparse.coordinates import unravel
from op_registry.sparse.elementwise import records_among
from op_registry.sparse.lowering import ForRule, first_of
from op_registry.sparse.padded_rows import PaddedRows
from op_registry.sparse.record import NotLowered, Sparse, from_coordinates
from op_registry.sparse.segments import Segments


@dataclass(frozen=True)
class SliceCall:
    """A call of a slice operator on one sparse record, its arguments bound by the schema.

    given   the dimensions as the caller gave them: a number, a list, or None for all of them
    dims    the same, counted from the front
    named   the other arguments by name
    """

    rule: Rule
    op: OpOverload
    slices: Slices
    x: Sparse
    given: Any
    dims: tuple[int, ...]
    named: dict[str, Any]

    @property
    def along(self) -> tuple[int, ...]:
        """The sparse ones among the dimensions."""
        return tuple(d for d in self.dims if d < self.x.pattern.ndim)

    def inside(self, lead: int) -> list[int]:
        """The dense ones, for values with `lead` dimensions in front of the dense ones."""
        return [d - self.x.pattern.ndim + lead for d in self.dims if d >= self.x.pattern.ndim]

    @property
    def keepdim(self) -> bool:
        return bool(self.named.get("keepdim", False))

    @property
    def number(self) -> int | None:
        """How many elements a slice must have, as the caller says."""
        return None if self.slices.number is None else int(self.named[self.slices.number])

    def run(self, record: Dense, dim: Any) -> Any:
        """The rule on a dense record, over other dimensions."""
        named = dict(self.named)
        if any(argument.name == self.slices.dim for argument in self.op._schema.arguments):
            named[self.slices.dim] = dim
        return self.rule.bind(self.op)(record, **named)


def slice_call(rule: Rule, op: OpOverload, *args: Any, **kwargs: Any) -> SliceCall:
    """The call as a :class:`SliceCall`; NotLowered where it is none, torch's own error where a dimension is none."""
    slices = rule.slices
    if slices is None:
        raise NotLowered("nothing says how its results lie in a slice")
    names = [a.name for a in op._schema.arguments]
    named = dict(zip(names, args, strict=False)) | kwargs
    x = named.pop(names[0])
    others = records_among(list(named.values()))
    if not isinstance(x, Sparse) or any(isinstance(r, Sparse) for r in others):
        raise NotLowered("only the first operand may be sparse")
    if any(r.ndim > 0 for r in others):
        raise NotLowered("another operand is dense")
    if 0 in x.shape:
        raise NotLowered("there is nothing in it")  # what an empty slice gives is torch's own affair
    given = _dim_given(op, slices, named)
    if given == [] and slices.none_for_no_dims:
        raise NotLowered("an empty list of dimensions reduces nothing")
    bound = max(x.ndim, 1)
    for d in () if given is None else (given,) if isinstance(given, int) else given:
        if not -bound <= d < bound:
            torch.empty(x.shape, device="meta").squeeze(d)  # raises torch's own error
    if slices.needs_elements and x.values.data.numel() == 0:
        raise NotLowered("torch refuses what has no elements, and nothing is stored")
    return SliceCall(rule, op, slices, x, given, wrap_dims(given, x.ndim), named)


def _dim_given(op: OpOverload, slices: Slices, named: dict[str, Any]) -> Any:
    for argument in op._schema.arguments:
        if argument.name == slices.dim:
            return named.pop(slices.dim, argument.default_value if argument.has_default_value() else None)
    return None


# ---------------------------------------------------------------------------------------------------- on the values


def on_dense_dims(rule: Rule, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """The rule on the values, each of which has the slice in its dense dimensions."""
    call = slice_call(rule, op, *args, **kwargs)
    if call.along:
        raise NotLowered("it works along sparse dimensions")
    inside = call.inside(call.x.pattern.lead)
    return map_tensors(
        call.x.like, call.run(call.x.values, inside[0] if isinstance(call.given, int) else inside), Dense
    )


# ------------------------------------------------------------------------------------------------------ by segments


def by_segments(function: Callable[..., Any]) -> ForRule:
    """A lowering by segments, of ``function(over, x, op, **options)``.

    over     the slices, as :class:`Segments`
    x        the stored values one after another, a dense record
    options  the operator's arguments by name, without those that say which dimensions
    """

    def run(rule: Rule, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
        call = slice_call(rule, op, *args, **kwargs)
        if not call.along:
            raise NotLowered("it works along dense dimensions")
        x, options = call.x, {k: v for k, v in call.named.items() if k != "keepdim"}
        result = function(Segments(x, call.along, call.inside(1)), x.flat, op, **options)
        if call.slices.gives != "one":
            return map_tensors(x.folded, result, Dense)
        kept = [1 if d in call.dims else size for d, size in enumerate(x.shape)]
        shape = kept if call.keepdim else [size for d, size in enumerate(x.shape) if d not in call.dims]
        return _reshaped(result, lambda _: shape)

    return ForRule(run)


# --------------------------------------------------------------------------------------------------------- on lines


def on_padded_rows(rule: Rule, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """The rule on lines, and the results back in their places."""
    call = slice_call(rule, op, *args, **kwargs)
    x, slices, number = call.x, call.slices, call.number
    if not call.along:
        raise NotLowered("it works along dense dimensions")
    if number is not None and number > math.prod(x.shape[d] for d in call.dims):
        raise NotLowered(f"torch refuses a {slices.number} that is greater than the slice")
    lines = PaddedRows(x, call.along, at_least=max(1, number or 1))
    record = lines.spread(x.flat)
    if slices.gives == "one" and not isinstance(call.given, int) and len(call.dims) == x.ndim:
        return _of_everything(call, lines, record)
    result = call.run(record, 1 if isinstance(call.given, int) else [1, *call.inside(2)])
    result = _each(result, slices.positions, lambda r: _positions(r, lines))
    if slices.gives != "one":
        return map_tensors(lambda r: _in_their_places(r, lines, call), result, Dense)
    return _reshaped(result, lambda shape: _reduced_shape(shape, lines, call))


def _of_everything(call: SliceCall, lines: PaddedRows, record: Dense) -> Any:
    whole = record.map(lambda t: t.squeeze(0))
    result = call.run(whole, None if call.given is None else list(range(whole.ndim)))
    result = _each(result, call.slices.positions, lambda r: _whole_positions(r, lines, call.x))

    def reduced(shape: torch.Size) -> Sequence[int]:
        if call.keepdim:
            return (1,) * call.x.ndim
        return shape[1:] if shape[:1] == (0,) else shape

    return _reshaped(result, reduced)


def _each(result: Any, which: Sequence[int], change: Callable[[Dense], Dense]) -> Any:
    """A result with some of its records changed, by position."""
    if isinstance(result, Dense):
        return change(result) if 0 in which else result
    return tuple(change(r) if n in which else r for n, r in enumerate(result))


def _reshaped(result: Any, shape_of: Callable[[torch.Size], Sequence[int]]) -> Any:
    return map_tensors(lambda r: r.map(lambda t: t.reshape(tuple(shape_of(t.shape)))), result, Dense)


def _reduced_shape(shape: torch.Size, lines: PaddedRows, call: SliceCall) -> tuple[int, ...]:
    if not call.keepdim:
        return (*lines.sizes, *shape[1:])
    return (*(1 if d in call.along else size for d, size in enumerate(call.x.pattern.sizes)), *shape[2:])


def _positions(result: Dense, lines: PaddedRows) -> Dense:
    """Positions in a line as positions in the slice that it was made of."""
    position = result.data.clamp(0, lines.width - 1)
    flat = position.reshape(lines.slices, -1)
    return result.like(lines.coordinates().gather(1, flat).reshape(result.shape))


def _whole_positions(result: Dense, lines: PaddedRows, x: Sparse) -> Dense:
    """A position among all stored elements as one in the flattened tensor."""
    each = math.prod(x.dense_sizes)
    line, rest = result.data // each, result.data % each
    coordinates = lines.coordinates()[0]
    return result.like(coordinates[line.clamp(0, lines.width - 1)] * each + rest)


def _in_their_places(r: Dense, lines: PaddedRows, call: SliceCall) -> Any:
    """Lines of a result with as many elements as were stored: where those were, or in order at the front."""
    x, along = call.x, call.along
    if call.slices.gives == "each":
        return x.folded(lines.collect(r))
    if len(along) != 1:
        raise NotLowered("it sorts along one dimension only")
    width = r.shape[1]
    taken = lines.slots if width == lines.width else None
    if taken is None:
        line, position = lines.slots // lines.width, lines.slots % lines.width
        kept = position < width
        taken = (line * width + position)[kept]
    position = taken % width
    others = iter(unravel(taken // width, lines.sizes))
    places = tuple(position if d == along[0] else next(others) for d in range(x.pattern.ndim))
    sizes = list(x.pattern.sizes)
    if call.number is not None:
        sizes[along[0]] = width
    flat = r.map(lambda t: t.reshape(-1, *t.shape[2:])[taken])
    return from_coordinates(x.pattern.layout.exact_sibling, places, flat, sizes)


ON_DENSE_DIMS, ON_PADDED_ROWS = ForRule(on_dense_dims), ForRule(on_padded_rows)
SLICEWISE = first_of(ON_DENSE_DIMS, ON_PADDED_ROWS)


def lowers_by_segments(*rules: Rule) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: how rules run by segments, which is tried before their dense runs on values and on lines."""

    def hang(function: Callable[..., Any]) -> Callable[..., Any]:
        for rule in rules:
            rule.lowering(Sparse)(first_of(by_segments(function), SLICEWISE))
        return function

    return hang
