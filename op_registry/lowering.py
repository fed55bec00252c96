"""How operators run on sparse records: by a run of their own, or by their category's.

    elementwise   the rule on the values as they lie. The result is stored where one operand of the result's shape is:
                  an element that is absent in it is invalid in the result, so exp, cos and division stay sparse
    slices        reductions, scans, softmax, sorts: the rule on the values where only dense dimensions are concerned,
                  else on *lines*, the stored elements of each slice side by side (lines.py)

What cannot be done so raises NotLowered; whoever asked may store the operands densely and ask again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from op_registry.categories import run_elementwise
from op_registry.lines import Lines
from op_registry.patterns import Places, unraveled
from op_registry.places import gathered
from op_registry.records import Dense, accumulation_dtype, all_dims, gradients_may_flow, map_tensors
from op_registry.rule import Rule
from op_registry.segments import Segments
from op_registry.sparse import NotLowered, Sparse, arranged, to_dense, unblocked
from op_registry.turned import Turned, in_base_order

SparseRun = Callable[..., Any]


def sparse_runs(op: OpOverload, rule: Rule, turned: bool) -> Iterator[SparseRun]:
    """What may run an overload where an argument is a sparse record, in order: the rule's own runs, its category's.

    `turned` says that one of them is seen with its dimensions in another order.
    """
    for own in rule.lowerings.get(Turned if turned else Sparse, ()):
        yield functools.partial(own, op) if rule.takes_op else own
    generic = GENERIC.get(rule.category.name)
    if turned and generic is elementwise_on_values:
        yield in_base_order(functools.partial(elementwise_on_values, op, rule))
    if not turned and generic is not None:
        yield functools.partial(generic, op, rule)


def run_sparsely(op: OpOverload, rule: Rule, args: Any, kwargs: Any) -> Any:
    """The result of the first sparse run that takes the call; NotLowered, with the reasons, where there is none."""
    reasons = []
    for run in sparse_runs(op, rule, turned=_any_turned([*args, *kwargs.values()])):
        try:
            return run(*args, **kwargs)
        except NotLowered as reason:  # noqa: PERF203
            reasons.append(str(reason))
    raise NotLowered("; ".join(reasons) or "its rule works on dense storage")


def _any_turned(values: Sequence[Any]) -> bool:
    return any(isinstance(v, Turned) or (isinstance(v, (list, tuple)) and _any_turned(v)) for v in values)


# ---------------------------------------------------------------------------------------------------- elementwise

# Rules written as functions that keep every element in its place, of operators that torch does not tag as pointwise.
PLACE_BY_PLACE = {
    "clone", "_to_copy", "detach", "alias", "lift", "lift_fresh", "lift_fresh_copy", "detach_copy", "alias_copy",
    "_lazy_clone", "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full",
    "new_empty", "masked_fill",
}  # fmt: skip


def elementwise_on_values(op: OpOverload, rule: Rule, *args: Any, **kwargs: Any) -> Any:
    """The rule on the values of one sparse operand, and on what the others have in its places."""
    place_by_place = rule.run is run_elementwise or torch.Tag.pointwise in op.tags or name_of(op) in PLACE_BY_PLACE
    if not place_by_place or any(argument.name in ("dim", "dims") for argument in op._schema.arguments):
        raise NotLowered("its elements read their neighbours")
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise NotLowered("it draws a random number for every element, stored or not")
    lead = leading(_records([*args, *kwargs.values()]))
    if kwargs.get("memory_format") is not None:
        # The order in memory of a dense tensor, which is not that of the values; torch's own errors are raised.
        torch.empty(lead.shape, device="meta").clone(memory_format=kwargs["memory_format"])
        kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}

    def in_its_places(record: Any) -> Dense:
        return values_at(record, lead)

    args, named = map_tensors(in_its_places, (args, list(kwargs.items())), (Dense, Sparse))
    return map_tensors(lead.like, rule.bind(op)(*args, **dict(named)), Dense)


# How a sparse record is brought to a shape that it broadcasts to (ops/sparse_movement.py).
EXPANDERS: list[Callable[[Sparse, Sequence[int]], Any]] = []


def leading(records: Sequence[Dense | Sparse]) -> Sparse:
    """The sparse operand that has the shape of them all, or the first one expanded to it; NotLowered where none is."""
    first = records[0]
    if isinstance(first, Sparse) and all(
        isinstance(r, Sparse) and r.pattern is first.pattern and r.values.shape == first.values.shape for r in records
    ):
        return first
    shape = torch.broadcast_shapes(*(r.shape for r in records))
    for record in records:
        if isinstance(record, Sparse) and record.shape == shape:
            return record
    for record in records:
        if isinstance(record, Sparse) and 0 not in shape:
            grown = EXPANDERS[0](record, shape)
            if isinstance(grown, Sparse):
                return grown
    raise NotLowered(f"no sparse operand has the shape of the result, {tuple(shape)}")


def _records(values: Sequence[Any]) -> list[Any]:
    """Every record among arguments, dense or sparse, through lists."""
    found: list[Any] = []
    map_tensors(found.append, list(values), (Dense, Sparse))
    return found


def values_at(record: Dense | Sparse, lead: Sparse) -> Dense:
    """What a record has in the places where `lead` stores a value, shaped to broadcast with `lead.values`."""
    pattern, dense = lead.pattern, len(lead.dense_sizes)
    if isinstance(record, Sparse):
        if record.ndim <= dense:
            return to_dense(record)  # meets dense dimensions alone, as a whole: no more than `lead` has in one place
        if len(record.dense_sizes) != dense:
            raise NotLowered("two operands are sparse in different dimensions")
        if record.pattern.same_as(pattern):
            return record.values
        sizes = record.pattern.sizes
        return record.at(_broadcast(pattern.places()[pattern.ndim - len(sizes) :], sizes)).moved(pattern.fold)
    if record.ndim <= dense:
        # Nothing to choose by place; a 0-d tensor stays one, since torch lets it take part with its kind only.
        return record
    sparse = record.ndim - dense  # how many of the record's dimensions meet sparse ones
    sizes = record.shape[:sparse]
    if all(size == 1 for size in sizes):
        return record.moved(lambda t: t.reshape((1,) * pattern.lead + tuple(t.shape[sparse:])))
    places = pattern.places()[pattern.ndim - sparse :]
    if len(places) != sparse:
        raise NotLowered(f"a dense operand of shape {tuple(record.shape)} has more dimensions than the sparse one")
    index = _broadcast(places, sizes)
    validity = record.full_validity
    data = record.data
    # The derivative is a sum over the places that read an element: as everywhere, not in half precision.
    wide = accumulation_dtype(data.dtype) if gradients_may_flow(data) else data.dtype
    taken = gathered(data.to(wide), index).to(data.dtype)
    return Dense(taken, None if validity is None else gathered(validity, index)).moved(pattern.fold)


def _broadcast(places: Places, sizes: Sequence[int]) -> Places:
    """The places in a tensor of `sizes` that broadcasting would bring to `places`."""
    return tuple(p if size != 1 else torch.zeros_like(p) for p, size in zip(places, sizes, strict=True))


# ---------------------------------------------------------------------------------------------------------- slices

# Which results of an operator are positions in the dimension that it works along.
POSITIONS = {
    "argmax": (0,), "argmin": (0,), "max": (1,), "min": (1,), "median": (1,), "nanmedian": (1,), "mode": (1,),
    "kthvalue": (1,), "cummax": (1,), "cummin": (1,), "sort": (1,), "argsort": (0,), "topk": (1,),
}  # fmt: skip


# Reductions of everything to one element, which have no `dim`.
WHOLE = {
    "sum", "mean", "prod", "max", "min", "any", "all", "argmax", "argmin", "median", "nanmedian", "std", "var", "norm",
    "nansum", "logsumexp", "count_nonzero", "aminmax", "amax", "amin",
}  # fmt: skip

# Those that take `dim`, and mean something else by it than a slice whose elements are left out one by one.
OTHERWISE = ("trapezoid", "trapz", "cumulative_trapezoid", "renorm")


def name_of(op: OpOverload) -> str:
    """`aten::sum.dim_IntList` → `sum`."""
    return op._schema.name.partition("::")[2]


def slices_by_lines(op: OpOverload, rule: Rule, x: Any, *args: Any, **kwargs: Any) -> Any:
    """The rule on the values, or on lines, of the one sparse operand; the results back in their places."""
    if not isinstance(x, Sparse) or any(isinstance(r, Sparse) for r in _records([*args, *kwargs.values()])):
        raise NotLowered("only the first operand may be sparse")
    if 0 in x.shape:
        raise NotLowered("there is nothing in it")  # what an empty slice gives is torch's own affair
    if (
        name_of(op) in ("any", "all")
        and op._overloadname == "dims"
        and kwargs.get("dim", args[0] if args else None) == []
    ):
        raise NotLowered("an empty list of dimensions reduces nothing")
    by_dim = any(a.name == "dim" for a in op._schema.arguments)
    if op.namespace == "torch_masked":
        raise NotLowered("its operands are taken apart first")
    if (not by_dim and name_of(op) not in WHOLE) or name_of(op) in OTHERWISE:
        raise NotLowered("it is no reduction of a slice to an element")
    named = dict(zip([a.name for a in op._schema.arguments], (x, *args), strict=False)) | kwargs
    first = op._schema.arguments[0].name
    del named[first]
    given = _dim_given(op, named)
    if given == [] and op._overloadname == "dims":
        raise NotLowered("any and all reduce nothing over an empty list of dimensions")
    dims = all_dims(given, x.ndim)
    if any(isinstance(r, Dense) and r.ndim > 0 for r in _records(list(named.values()))):
        raise NotLowered("another operand is dense")
    run = functools.partial(_called, rule.bind(op), first)
    bound = max(x.ndim, 1)
    for d in () if given is None else (given,) if isinstance(given, int) else given:
        if not -bound <= d < bound:
            torch.empty(x.shape, device="meta").squeeze(d)  # raises torch's own error
    if "quantile" in name_of(op) and x.values.data.numel() == 0:
        raise NotLowered("torch's quantile refuses what has no elements, and nothing is stored")
    sparse, keeps = x.pattern.ndim, rule.category.name in ("scan", "normalization", "sorting")
    along = tuple(d for d in dims if d < sparse)
    if not along:
        shifted = [d - sparse + x.pattern.lead for d in dims]
        result = run(x.values, named, shifted[0] if isinstance(given, int) else shifted)
        return map_tensors(x.like, result, Dense)
    name = name_of(op)
    segmented = SEGMENTED.get(name)
    if segmented is not None:
        over = Segments(x, along, [d - sparse + 1 for d in dims if d >= sparse])
        options = {k: v for k, v in named.items() if k not in ("dim", "keepdim")}
        try:
            result = segmented(over, x.flat, op, **options)
        except NotSegmented:
            pass
        else:
            if keeps:
                return map_tensors(x.folded, result, Dense)
            kept = [1 if d in dims else size for d, size in enumerate(x.shape)]
            shape = kept if _keepdim(op, named) else [size for d, size in enumerate(x.shape) if d not in dims]
            return _reshaped(result, lambda _: shape)
    if "k" in named and int(named["k"]) > math.prod(x.shape[d] for d in dims):
        raise NotLowered("torch refuses a k that is greater than the slice")
    everything = not isinstance(given, int) and len(dims) == x.ndim and not keeps
    lines = Lines(x, along, at_least=max(1, int(named["k"])) if "k" in named else 1)
    record = lines.spread(x.flat)
    if everything:
        whole = record.moved(lambda t: t.squeeze(0))
        result = run(whole, named, None if given is None else list(range(whole.ndim)))
        if name in ("argmax", "argmin"):
            result = _whole_positions(result, lines, x)
        return _reshaped(
            result, lambda shape: (1,) * x.ndim if _keepdim(op, named) else shape[1:] if shape[:1] == (0,) else shape
        )
    inside = [1] + [d - sparse + 2 for d in dims if d >= sparse]
    result = run(record, named, 1 if isinstance(given, int) else inside)
    if name in POSITIONS:
        result = _mapped_positions(result, POSITIONS[name], lines)
    if keeps:
        return map_tensors(lambda r: _in_their_places(r, lines, x, name, along), result, Dense)
    return _reshaped(result, lambda shape: _reduced_shape(shape, x, along, lines, _keepdim(op, named)))


class NotSegmented(Exception):
    """A call that is not written by segments, though its operator is."""


# How reductions run by segments, by the operator's name: given the slices, the stored values one after another, the
# overload and the other arguments by name.
SEGMENTED: dict[str, Callable[..., Any]] = {}


def by_segments(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: how the operators of these names run by segments."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        SEGMENTED.update(dict.fromkeys(names, function))
        return function

    return register


def _called(run: Callable[..., Any], first: str, record: Dense, named: dict[str, Any], dim: Any) -> Any:
    arguments = dict(named)
    if "dim" in arguments or dim is not None:
        arguments["dim"] = dim
    return run(record, **arguments)


def _dim_given(op: OpOverload, named: dict[str, Any]) -> Any:
    for argument in op._schema.arguments:
        if argument.name == "dim":
            return named.get("dim", argument.default_value if argument.has_default_value() else None)
        if argument.name in ("normalized_shape", "dims"):
            raise NotLowered(f"{op} works along dimensions of its own choice")
    return None


def _keepdim(op: OpOverload, named: dict[str, Any]) -> bool:
    return bool(named.get("keepdim", False))


def _reshaped(result: Any, shape_of: Callable[[torch.Size], Sequence[int]]) -> Any:
    return map_tensors(lambda r: r.moved(lambda t: t.reshape(tuple(shape_of(t.shape)))), result, Dense)


def _reduced_shape(
    shape: torch.Size, x: Sparse, along: tuple[int, ...], lines: Lines, keepdim: bool
) -> tuple[int, ...]:
    if not keepdim:
        return (*lines.sizes, *shape[1:])
    return (*(1 if d in along else size for d, size in enumerate(x.pattern.sizes)), *shape[2:])


def _mapped_positions(result: Any, which: tuple[int, ...], lines: Lines) -> Any:
    """Positions in a line as positions in the slice that it was made of."""

    def mapped(r: Dense) -> Dense:
        coordinates = lines.coordinates()
        position = r.data.clamp(0, lines.width - 1)
        flat = position.reshape(lines.slices, -1)
        return r.like(coordinates.gather(1, flat).reshape(r.shape))

    if isinstance(result, Dense):
        return mapped(result)
    return tuple(mapped(r) if n in which else r for n, r in enumerate(result))


def _whole_positions(result: Dense, lines: Lines, x: Sparse) -> Dense:
    """A position among all stored elements as one in the flattened tensor."""
    each = math.prod(x.dense_sizes)
    line, rest = result.data // each, result.data % each
    coordinates = lines.coordinates()[0]
    return result.like(coordinates[line.clamp(0, lines.width - 1)] * each + rest)


def _in_their_places(r: Dense, lines: Lines, x: Sparse, name: str, along: tuple[int, ...]) -> Any:
    """Lines of a result with as many elements as were stored: where those were, or sorted to the front of the slice."""
    if name not in ("sort", "argsort", "topk"):
        return x.folded(lines.collect(r))
    if len(along) != 1:
        raise NotLowered("sorted along one dimension only")
    width = r.shape[1]
    taken = lines.slots if width == lines.width else None
    if taken is None:
        line, position = lines.slots // lines.width, lines.slots % lines.width
        kept = position < width
        taken = (line * width + position)[kept]
    position = taken % width
    line = taken // width
    others = iter(unraveled(line, lines.sizes))
    places = tuple(position if d == along[0] else next(others) for d in range(x.pattern.ndim))
    sizes = list(x.pattern.sizes)
    if name == "topk":
        sizes[along[0]] = width
    flat = r.moved(lambda t: t.reshape(-1, *t.shape[2:])[taken])
    return arranged(unblocked(x.pattern.layout), places, flat, sizes)


GENERIC: dict[str, Callable[..., Any]] = {
    "elementwise": elementwise_on_values,
    "factory": elementwise_on_values,
    "plumbing": elementwise_on_values,
    "reduction": slices_by_lines,
    "scan": slices_by_lines,
    "normalization": slices_by_lines,
    "sorting": slices_by_lines,
}
