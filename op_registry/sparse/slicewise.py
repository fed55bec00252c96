"""Slice operators on sparse records: reductions, scans, softmax, norms, sorts.

Law: each result depends on the valid elements of one slice, and all of those are stored. Which dimensions a slice and
each result have, the rule states (``dims=Slices(…)``, ``dims=LastDims(…)``). It runs on stored elements in one of three
ways, tried in this order:

    by_segments       a function of slices (`over_slices`), by segment: one pass, whatever their lengths
    ON_DENSE_DIMS     the dense rule on the values, if only dense dimensions are concerned
    ON_PADDED_ROWS    the dense rule on padded rows, the stored elements of each slice side by side

A slice over some dimensions consists of the same elements whatever the order of dimensions, so on permuted records the
operator runs on the base, over the dimensions that those show. Operators whose result depends on the order of the
elements of a slice (scans, sorts, positions) do so for slices over one dimension. A move along one dimension is the
same move along that dimension of the base.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.bound import Bound
from op_registry.dimensions.labels import Dimensions, Labels, tensor_arguments
from op_registry.dimensions.sizes import known_to_hold
from op_registry.dimensions.slices import LastDims, Slices
from op_registry.records.arguments import Dims, shape_alone, wrap_dim
from op_registry.records.dense import Dense, map_tensors, valid_in_all
from op_registry.rule import Rule
from op_registry.sparse.convert import from_coordinates, to_dense
from op_registry.sparse.lowering import OnCall, first_of, planned, run_sparsely
from op_registry.sparse.on_values import align_to
from op_registry.sparse.permuted import Permuted, shown_as
from op_registry.sparse.record import NotLowered, Sparse
from op_registry.sparse.segments import PaddedRows, Segments

# What the rule of a slice operator returns.
Result = Dense | tuple[Dense, ...]


# A function of slices: ``body(op, over, x, *parameters, **options)`` returns tensors.
Body = Callable[..., Any]


@functools.lru_cache(maxsize=1024)
def _kinds_of_arguments(op: OpOverload, dims: Dimensions) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """The names of an operator's arguments behind the first; of those that are tensors; of those that `dims` reads."""
    names = tuple(a.name for a in op._schema.arguments[1:])
    read = (dims.dim, dims.keepdim) if isinstance(dims, Slices) else (dims.count,) if isinstance(dims, LastDims) else ()
    return names, tensor_arguments(op)[1:], tuple(name for name in read if name in names)


def for_body(
    op: OpOverload, dims: Dimensions, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The parameters and the options of a function of slices, from the arguments behind the first one."""
    names, tensors, read = _kinds_of_arguments(op, dims)
    options = {**dict(zip(names, args, strict=False)), **kwargs}
    parameters = [options.pop(name, None) for name in tensors]
    for name in read:
        options.pop(name, None)
    return parameters, options


class SliceCall(NamedTuple):
    """A call of a slice operator on one sparse record, `x`.

    name       the argument that is the record
    labels     those of the call's dimensions
    dims       the dimensions of a slice, non-negative
    along      the sparse ones among them
    others     the names of other operands
    stored     the names of sparse ones among them
    wide       whether one of them has sparse dimensions of the record
    of_values  the argument that names the dimensions, if there is one, with those of the values, if all are dense
    """

    c: Bound
    x: Sparse
    name: str
    labels: Labels
    dims: list[int]
    along: list[int]
    others: list[str]
    stored: list[str]
    wide: bool
    of_values: dict[str, Dims]

    @property
    def slices(self) -> Slices:
        dims = self.c.rule.dims
        return dims if isinstance(dims, Slices) else Slices("each", dim=None)

    @property
    def dim(self) -> Dims:
        """The dimensions as the caller passed them: a number, a list, or None for all."""
        name = self.slices.dim
        return None if name is None else self.c.named.get(name)

    def inside(self, lead: int) -> list[int]:
        """The dense dimensions of a slice, as dimensions of values with `lead` dimensions before the dense ones."""
        sparse = self.x.pattern.ndim
        return [d - sparse + lead for d in self.dims if d >= sparse]

    def shape_of(self, result: int) -> list[int]:
        """The shape of a result that has one value for each slice."""
        size = dict(zip(self.labels.operands[self.name], self.x.shape, strict=True))
        return [1 if label is None else size[label] for label in self.labels.results[result]]

    @property
    def number(self) -> int | None:
        """The number of elements that a slice needs at least, if an argument states one (topk's k)."""
        return None if self.slices.number is None else int(self.c.named[self.slices.number])

    def run(self, record: Dense, dims: Mapping[str, Dims]) -> Any:
        """The rule on a dense record; `dims` is the argument that names the dimensions of a slice, if there is one."""
        changed = {**dims, self.name: record}
        for name in self.stored:
            changed[name] = to_dense(self.c.named[name])
        return self.c.run_with(changed)

    def over(self, dim: Dims) -> dict[str, Dims]:
        """These dimensions as the operator's argument, if it has one."""
        name = self.slices.dim
        return {name: dim} if name is not None and name in self.c.named else {}

    def refusal(self, wanted: str) -> NotLowered:
        """Why this call is none along `wanted` dimensions alone."""
        other = "sparse" if wanted == "dense" else "dense"
        named = ", ".join(map(str, self.along if other == "sparse" else self.dims)) or "none"
        return NotLowered(f"it works along dimension {named}, {other} here")


@planned
def slicing_of(c: Bound, labels: Labels | None) -> tuple[Any, ...]:
    """The fields of SliceCall but for `c` and `x`; torch's error for a dimension out of range."""
    dims, name = c.rule.dims, c.op._schema.arguments[0].name
    if not isinstance(dims, (Slices, LastDims)):
        where = "" if c.rule.is_built_in else " (in its rule: dims=Slices(...), or a lowering)"
        raise NotLowered(f"no form of it for sparse storage is written{where}")
    x = c.named[name]
    if not isinstance(x, Sparse):
        raise NotLowered("only the first operand may be sparse")
    if labels is None:
        dim = c.named.get(dims.dim) if isinstance(dims, Slices) and dims.dim is not None else None
        for d in () if dim is None else (dim,) if isinstance(dim, int) else dim:
            shape_alone(x.shape).squeeze(d)  # raises torch's own error
        raise NotLowered("the shapes do not match")
    others = {other: y for other, y in c.named.items() if other != name and isinstance(y, (Dense, Sparse))}
    for other, y in others.items():
        if not labels.belongs_to(name, other):
            raise NotLowered(f"{other}, {'sparse' if isinstance(y, Sparse) else 'dense'}, is no number")
    along = [d for d, label in enumerate(labels.operands[name]) if label in labels.roles]
    wide = any(y.ndim > len(x.dense_sizes) for y in others.values())
    stored = [other for other, y in others.items() if isinstance(y, Sparse)]
    sparse = [d for d in along if d < x.pattern.ndim]
    call = SliceCall(c, x, name, labels, along, sparse, list(others), stored, wide, {})
    inside = call.inside(x.pattern.lead)
    named = {} if sparse else call.over(inside[0] if isinstance(call.dim, int) else inside)
    return call._replace(of_values=named)[2:]


def slice_call(c: Bound) -> SliceCall:
    """A call as :class:`SliceCall`; NotLowered if it is not one."""
    dims, named, plan = c.rule.dims, c.named, slicing_of(c)
    call = SliceCall(c, named[plan[0]], *plan)
    shape = call.x.shape
    if 0 in shape:
        raise NotLowered("its input is empty")  # results of empty slices are torch's, computed densely
    if isinstance(dims, LastDims) and not dims.sizes_match(shape, [named[n] for n in call.others], named):
        raise NotLowered("the shapes do not match")
    if isinstance(dims, Slices) and dims.needs_elements and known_to_hold(call.x.values.data.numel() == 0):
        raise NotLowered("torch refuses input without elements, and nothing is stored")
    return call


# ---------------------------------------------------------------------------------------------------- on the values


def on_dense_dims(c: Bound) -> Any:
    """The rule on the values, for slices that run over dense dimensions only."""
    return of_values(slice_call(c))


def of_values(call: SliceCall) -> Any:
    """The same of a call."""
    if call.along:
        raise call.refusal("dense")
    if call.wide:
        raise NotLowered("an operand has sparse dimensions of the first one")
    return map_tensors(call.x.like, call.run(call.x.values, call.of_values), Dense)


# ------------------------------------------------------------------------------------------------------ by segments


def at_elements(parameter: Dense | Sparse | None, x: Sparse) -> Dense | None:
    """A parameter that broadcasts with `x`, for each of its stored elements."""
    if parameter is None or (isinstance(parameter, Dense) and parameter.ndim <= len(x.dense_sizes)):
        return parameter
    return x.like(align_to(parameter, x).map(lambda t: t.expand(x.values.shape))).flat


def by_segments(body: Body) -> OnCall:
    """A lowering by segments, from ``body(op, over, x, *parameters, **options)``.

    over        the slices, as :class:`Segments`
    x           the stored values in storage order, a dense record
    parameters  the other tensors at the coordinates of the stored values
    options     the operator's arguments by name, except those that state the dimensions

    It returns a tensor for each result, with a value for each element or for each slice: what is valid, the law says.
    """

    def run(c: Bound) -> Any:
        call, dims, op = slice_call(c), c.rule.dims, c.op
        assert isinstance(dims, (Slices, LastDims))
        if not call.along:
            return of_values(call)
        x, flat = call.x, call.x.flat
        (_, *args), kwargs = c.given
        given, options = for_body(op, dims, args, kwargs)
        parameters = [at_elements(p, x) for p in given]
        of_elements = [dims.is_of_elements(op, n) for n in range(len(op._schema.returns))]
        over = Segments(x, call.along, call.inside(1))
        # Layouts that list rows have memory for each row in any case, and sums by row that rely on it.
        if all(of_elements) and over.ends is None:
            over = Segments(x, call.along, call.inside(1), occupied=True)
        validity = valid_in_all(flat, *parameters)

        def shown(n: int, values: Tensor) -> Dense | Sparse:
            if of_elements[n]:
                return x.folded(Dense(values, validity))
            shape = call.shape_of(n)
            return Dense(values.reshape(shape), over.exists(flat).reshape(shape))

        results = body(op, over, flat, *parameters, **options)
        if isinstance(results, Tensor):
            return shown(0, results)
        return tuple(shown(n, values) for n, values in enumerate(results))

    return OnCall(run)


# --------------------------------------------------------------------------------------------------- on padded rows


def on_padded_rows(c: Bound) -> Any:
    """The rule on padded rows, with its results moved back to the coordinates of the elements."""
    call = slice_call(c)
    x, slices, number, along = call.x, call.slices, call.number, call.along
    if not along or not isinstance(c.rule.dims, Slices):
        raise call.refusal("dense" if along else "sparse")
    if number is not None and number > math.prod(x.shape[d] for d in call.dims):
        raise NotLowered(f"torch refuses a {slices.number} that is greater than the slice")
    rows = PaddedRows(x, along, at_least=max(1, number or 1), occupied=slices.gives != "one")
    record = rows.pad(x.flat)
    if slices.gives == "one" and not isinstance(call.dim, int) and len(call.dims) == x.ndim:
        return _over_all_elements(call, rows, record)
    inside = call.inside(2)
    result = call.run(record, call.over(1 if isinstance(call.dim, int) else [1, *inside]))
    if inside and c.rule.positions:
        raise NotLowered("its results are positions in slices of sparse and dense dimensions")
    size = math.prod(x.shape[d] for d in along)
    result = _with_positions(c.rule, result, rows.width, size, partial(_position_in_slice, rows))
    if slices.gives != "one":
        return map_tensors(lambda r: _to_sparse(r, rows, call), result, Dense)
    return _reshaped(result, call)


def _over_all_elements(call: SliceCall, rows: PaddedRows, record: Dense) -> Any:
    single_row = record.map(lambda t: t.squeeze(0))
    result = call.run(single_row, call.over(None if call.dim is None else list(range(single_row.ndim))))
    inner = math.prod(call.x.dense_sizes)
    size = math.prod(call.x.shape)
    result = _with_positions(call.c.rule, result, rows.width * inner, size, partial(_position_in_tensor, rows, inner))
    return _reshaped(result, call)


def _with_positions(rule: Rule, result: Result, seen: int, size: int, moved: Callable[[Tensor], Tensor]) -> Result:
    """Results whose positions in slices are those among all `size` elements.

    seen   how many elements of a slice the rule saw
    moved  the position in the slice of each of these
    """
    results = (result,) if isinstance(result, Dense) else result
    if rule.positions is None and any(not _may_be_no_position(r) for r in results):
        raise NotLowered(
            "it has integer results, and its rule does not say which of them are positions in the slice (in its rule: "
            "dims=Slices(positions=(0,)) for the first, positions=() for none)"
        )

    def at(r: Dense) -> Dense:
        position = r.data
        found = moved(position.clamp(0, max(seen - 1, 0))).to(position.dtype)
        beyond = torch.where(position < 0, position, position + (size - seen))  # no position, as below 0
        return r.like(torch.where((position >= 0) & (position < seen), found, beyond))

    changed = tuple(at(r) if n in (rule.positions or ()) else r for n, r in enumerate(results))
    return changed[0] if isinstance(result, Dense) else changed


def _may_be_no_position(result: Dense) -> bool:
    return result.dtype.is_floating_point or result.dtype.is_complex or result.dtype is torch.bool


def _reshaped(result: Result, call: SliceCall) -> Any:
    shape = call.shape_of(0)
    return map_tensors(lambda r: r.map(lambda t: t.reshape(shape)), result, Dense)


def _position_in_slice(rows: PaddedRows, position: Tensor) -> Tensor:
    """Positions in a padded row converted to positions in the original slice."""
    flat = position.reshape(rows.slices, -1).to(torch.int64)
    return rows.positions_in_slice().gather(1, flat).reshape(position.shape)


def _position_in_tensor(rows: PaddedRows, inner: int, position: Tensor) -> Tensor:
    """Positions among all stored elements converted to positions in the flattened tensor."""
    return rows.positions_in_slice()[0][position // inner] * inner + position % inner


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
    others = iter(rows.over.slice_of(slots // width))
    coordinates = tuple(column if d == along[0] else next(others) for d in range(x.pattern.ndim))
    sizes = list(x.pattern.sizes)
    if call.number is not None:
        sizes[along[0]] = width
    flat = r.map(lambda t: t.reshape(-1, *t.shape[2:])[slots])
    return from_coordinates(x.pattern.layout.exact_sibling, coordinates, flat, sizes)


ON_DENSE_DIMS, ON_PADDED_ROWS = OnCall(on_dense_dims), OnCall(on_padded_rows)
SLICEWISE = first_of(ON_DENSE_DIMS, ON_PADDED_ROWS)


def lowers_by_segments(*rules: Rule) -> Callable[[Body], Body]:
    """Decorator: the lowering of rules by segments, tried before the dense rule on values and on padded rows."""

    def decorator(function: Body) -> Body:
        for rule in rules:
            rule.lowering(Sparse)(first_of(by_segments(function), SLICEWISE))
        return function

    return decorator


# -------------------------------------------------------------------------------------------------- on permuted records


def on_base_dims(c: Bound) -> Any:
    """The rule on the base, over its dimensions that the given ones show."""
    dims, (first, x) = c.rule.dims, next(iter(c.named.items()))
    labels = c.labels if isinstance(dims, (Slices, LastDims)) else None
    others = {name: a for name, a in c.named.items() if name != first}
    if labels is None or not isinstance(x, Permuted) or any(isinstance(a, (Sparse, Permuted)) for a in others.values()):
        raise NotLowered("only the first operand may be sparse")
    if any(isinstance(a, Dense) and not labels.belongs_to(first, name) for name, a in others.items()):
        raise NotLowered("another operand is dense")
    along = [d for d, label in enumerate(labels.operands[first]) if label in labels.roles]
    of_base = [d for visible in along for d in x.groups[visible]]
    call = c.with_(**{first: x.base})
    if isinstance(dims, LastDims):
        if of_base != list(range(x.base.ndim - len(along), x.base.ndim)) or of_base[0] < x.base.pattern.ndim:
            raise NotLowered("the dimensions that it works on stand before sparse ones, or are sparse")
        return map_tensors(x.like, _run(call), Sparse)
    assert isinstance(dims, Slices)
    dim = None if dims.dim is None else c.named.get(dims.dim)
    if isinstance(dim, int) and len(of_base) > 1:
        raise NotLowered("it works along a dimension that is merged of others")
    if (dims.gives != "one" or c.rule.positions) and not isinstance(dim, int):
        raise NotLowered("its result depends on the order of elements in several dimensions")
    if dim is not None:
        call = call.with_(**{str(dims.dim): of_base[0] if isinstance(dim, int) else of_base})
    if dims.gives != "one":
        return map_tensors(x.like, _run(call), Sparse)
    if dims.keepdim not in c and len(of_base) < x.base.ndim:
        raise NotLowered("it has no keepdim")
    keepdim = bool(c.named.get(dims.keepdim))
    return map_tensors(lambda r: shown_without(r, x, along, keepdim), _run(call), (Dense, Sparse))


def along_base_dim(c: Bound) -> Any:
    """A move along one dimension of the first operand, on the base."""
    x, dim = c.self, wrap_dim(c.dim, c.self.ndim)
    moved = _run(c.with_(self=x.base, dim=x.base_dim(dim)))
    return map_tensors(lambda r: shown_without(r, x, [dim], r.ndim == x.base.ndim), moved, (Dense, Sparse))


def _run(call: Bound) -> Any:
    return call.applied(lambda *args, **kwargs: run_sparsely(call.op, call.rule, args, kwargs))


def shown_without(result: Dense | Sparse, x: Permuted, dims: Sequence[int], keepdim: bool) -> Any:
    """A result for the base of `x`, shown as `x`: without some of its dimensions, or (`keepdim`) with all of them."""
    gone = {d for dim in dims for d in x.groups[dim] if not keepdim}
    visible = [dim for dim in range(x.ndim) if keepdim or dim not in dims]
    groups = [[d - sum(g < d for g in gone) for d in x.groups[dim]] for dim in visible]
    if isinstance(result, Sparse):
        return shown_as(result, groups)
    shape = [1 if dim in dims else x.shape[dim] for dim in visible]
    return result.map(lambda t: t.permute([d for group in groups for d in group]).reshape(shape))


SLICEWISE_ON_BASE, ALONG_BASE_DIM = OnCall(on_base_dims), OnCall(along_base_dim)
