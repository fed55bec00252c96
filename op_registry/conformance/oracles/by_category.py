"""Oracles by the category of a rule and its schema: of other libraries' operators, and of aten's.

Oracles of single operators of aten know their arguments by aten's names. Here only the schema is known: the operand is
the first tensor argument, whatever its name, and a dimension is an argument called dim, dims, axis or axes. Each oracle
runs the operator itself on the valid elements.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from string import ascii_letters
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.conformance.oracles import pointwise, positions, products
from op_registry.conformance.oracles import whole_slices as slicewise
from op_registry.conformance.oracles.call import (
    Call,
    Expected,
    Group,
    Misdeclared,
    NoOracle,
    Oracle,
    Results,
    all_outputs_valid,
    broadcast_valid,
    groups,
    map_groups,
    oracle,
    reduce_groups,
    scatter_back,
    slices,
)
from op_registry.conformance.sample import tree_leaves
from op_registry.dimensions.equation import Equation
from op_registry.dimensions.slices import LastDims, Slices
from op_registry.registry import registry

# Arguments of these names are dimensions; those of other names that a rule states (`dimensions_of`) too.
DIMENSIONS = ("dim", "dims", "axis", "axes")
KEEPS = ("keepdim", "keepdims")
# The most calls of the operator that the oracle of contractions may make.
MOST_BASIS_CALLS = 3_000


class Stated(NamedTuple):
    """What the oracle of reductions supposes that a rule had stated.

    positions  the results that are positions in a slice
    one_more   a number, or a function of the dtype, of which each slice has one more element
    """

    positions: tuple[int, ...] | None = None
    one_more: Any = None


_AS_STATED = Stated()
_stated: ContextVar[Stated] = ContextVar("stated", default=_AS_STATED)


@contextlib.contextmanager
def stating(stated: Stated) -> Iterator[None]:
    """Suppose that rules state this."""
    token = _stated.set(stated)
    try:
        yield
    finally:
        _stated.reset(token)


def own_reduction(c: Call) -> Any:
    """The operator on the valid elements of each slice."""
    operand = only_operand(c)
    x, dim, keep = c[operand], _argument(c, dimensions_of(c.op)), _argument(c, _keeps(c.op))

    changes: dict[str, object] = {}
    if dim is not None:
        changes[dim] = _first_dimension(c, dim)
    if keep is not None:
        changes[keep] = False
    one, dims = _numbers_from(c, operand, changes), c.dims(x.ndim, dim or "")
    return reduce_slices(c, one, operand=operand, dims=dims, indices=_positions(c) or ())


def own_scan(c: Call) -> Any:
    """The operator on the valid elements along its dimension."""
    operand, dim = only_operand(c), _argument(c, dimensions_of(c.op))
    if dim is None or not isinstance(c[dim], int):
        raise NoOracle(f"the dimension of {c.name}: it has no argument called {', '.join(DIMENSIONS)}")
    return map_slices(c, _numbers_from(c, operand, {dim: 0}), c[dim], operand=operand, indices=_positions(c) or ())


def normalization(c: Call) -> Any:
    """The operator on the valid elements of each slice as one line, with its parameters at these elements."""
    rule = registry.get(c.op)
    dims = None if rule is None else rule.dims
    outs = len(c.op._schema.returns)
    if not isinstance(dims, (Slices, LastDims)) or not all(dims.is_of_elements(c.op, n) for n in range(outs)):
        raise NoOracle(f"{c.name}: its rule does not state slices, with a value for each element")
    first, *parameters = [name for name, value in c.bound.items() if isinstance(value, Expected)]
    x, labels = c[first], dims.labels(c.op, c.bound)
    if x.ndim == 0:
        return Expected(c.plain(), x.mask)
    if labels is None:
        raise Misdeclared(f"{c.name} takes operands of {[t.ndim for t in c.operands()]} dimensions, not {dims}")
    count = dims.count if isinstance(dims, LastDims) else None
    if count not in (None, 1) and not isinstance(count, str):
        raise NoOracle(f"{c.name} of slices that are no lines")
    if not all(labels.belongs_to(first, name) for name in parameters):
        raise NoOracle(f"{c.name}: its rule does not say how its tensors correspond")
    flat = {name: c[name].data.expand(x.shape).reshape(-1) for name in parameters}
    dim = _argument(c, dimensions_of(c.op))

    def one(group: Group) -> Any:
        changes: dict[str, object] = {name: values[group.flat] for name, values in flat.items()}
        if isinstance(count, str):
            changes[count] = [len(group.kept)]
        elif dim is not None and c[dim] is not None:
            changes[dim] = _first_dimension(c, dim)
        return c.plain(**changes, **{first: group.values[0]})

    over = [d for d, label in enumerate(labels.operands[first]) if label in labels.roles]
    mask = broadcast_valid(x.shape, c.operands())
    return map_groups(groups([x], slices(x.shape, over)), one, c.plain(), mask)


def _numbers_from(c: Call, operand: str, changes: Mapping[str, object]) -> Callable[[Tensor], Any]:
    """The operator on one slice's valid elements; NoOracle for a result that may be an index.

    An index among the valid elements has to be mapped to the whole slice, and the schema doesn't say whether an integer
    result is an index. A rule may: ``Slices(positions=(0,))``.
    """
    stated, one_more = _positions(c) is not None, _stated.get().one_more

    def one(values: Tensor) -> Any:
        if one_more is not None:
            number = one_more(values.dtype) if callable(one_more) else one_more
            values = torch.cat([values, values.new_full((1,), number)])
        result = c.plain(**changes, **{operand: values})
        for leaf in tree_leaves(result):
            is_integer = isinstance(leaf, Tensor) and leaf.dtype is torch.int64 and values.dtype is not torch.int64
            if is_integer and not stated:
                raise NoOracle(
                    f"whether the {leaf.dtype} result of {c.name} is an index or a number: its rule states "
                    "dims=Slices(positions=(0,)), or positions=()"
                )
        return result

    return one


def _positions(c: Call) -> tuple[int, ...] | None:
    if (supposed := _stated.get().positions) is not None:
        return supposed
    rule = registry.get(c.op)
    return None if rule is None else rule.positions


def contraction(c: Call) -> Expected:
    """The sum that the rule's equation states, written out; of a rule without one, over tuples of elements.

    Valid where a tuple of valid elements contributes, or where no tuple does. Without an equation, the operator itself
    computes the coefficient of each tuple, from tensors that are 1 at one index and 0 elsewhere.
    """
    rule = registry.get(c.op)
    if rule is not None and isinstance(rule.dims, Equation):
        return by_equation(c, rule.dims)
    names = [name for name, value in c.bound.items() if isinstance(value, Expected)]
    if len(names) != len(c.operands()):
        raise NoOracle(f"{c.name} of a list of tensors")
    operands = [c[name] for name in names]
    plain = c.plain()
    if not isinstance(plain, Tensor):
        raise NoOracle(f"{c.name} with more than one result")
    if math.prod(operand.data.numel() for operand in operands) > MOST_BASIS_CALLS:
        raise NoOracle(f"{c.name} of more than {MOST_BASIS_CALLS} tuples of elements")
    total = torch.zeros_like(plain)
    reached, contributed = (torch.zeros(plain.shape, dtype=torch.bool) for _ in range(2))
    for flat in itertools.product(*(range(operand.data.numel()) for operand in operands)):
        share = c.plain(**{n: _unit(x.data, k) for n, x, k in zip(names, operands, flat, strict=True)}).detach()
        contributed |= share != 0
        if all(bool(x.mask.reshape(-1)[k]) for x, k in zip(operands, flat, strict=True)):
            reached |= share != 0
            product = math.prod((x.data.reshape(-1)[k] for x, k in zip(operands, flat, strict=True)), start=share)
            total = total + torch.where(share != 0, product, 0)
    return Expected(torch.where(contributed, total, plain), reached | ~contributed)


def by_equation(c: Call, dims: Equation) -> Expected:
    """The sum of products that an equation describes, and what is added to it."""
    plain, stated = c.plain(), " or ".join(map(repr, dims.equations))
    operands = {name: x for name, x in c.bound.items() if isinstance(x, Expected)}
    labels = dims.labels(c.op, c.bound)
    if labels is None:
        raise Misdeclared(f"{c.name} takes operands of {[x.ndim for x in operands.values()]} dimensions, not {stated}")
    sizes: dict[object, set[int]] = {}
    for name, own in labels.operands.items():
        for label, size in zip(own, operands[name].shape, strict=True):
            if size != 1 or (isinstance(label, str) and name not in labels.added):
                sizes.setdefault(label, set()).add(size)
    for one, several in sizes.items():
        if len(several) > 1:
            raise Misdeclared(f"{c.name} is not {stated}: dimensions of sizes {sorted(several)} are one, {one}")
    letters = dict(zip({label: None for own in labels.operands.values() for label in own}, ascii_letters, strict=False))
    factors = {name: own for name, own in labels.operands.items() if name not in labels.added}
    *terms, result = ("".join(letters[label] for label in own) for own in (*factors.values(), labels.results[0]))
    total = products.tuples(f"{','.join(terms)}->{result}", *(operands[name] for name in factors), dtype=plain.dtype)
    if total.shape != plain.shape:
        shapes = f"its result has shape {tuple(plain.shape)}, and the sum {tuple(total.shape)}"
        raise Misdeclared(f"{c.name} is not {stated}: {shapes}")
    addend = next((operands[name] for name in labels.added), None)
    return products.added(c, total, addend, c.get("beta", 1), c.get("alpha", 1))


def whole_slices(c: Call) -> Any:
    """The operator on each slice without a hole: what the rule states, a matrix if it states nothing."""
    rule = registry.get(c.op)
    if rule is not None and isinstance(rule.dims, Equation):
        return slicewise.of_slices(c)
    over = rule.slices.dim if rule is not None and rule.slices is not None else None
    operand = only_operand(c)
    return slicewise.of_matrices(c, operand) if over is None else slicewise.of_blocks(c, None, operand, over)


def _unit(data: Tensor, index: int) -> Tensor:
    """A tensor like `data` that is 1 at a flat index and 0 elsewhere."""
    unit = torch.zeros(data.numel(), dtype=data.dtype)
    unit[index] = 1
    return unit.reshape(data.shape)


def dimensions_of(op: OpOverload) -> tuple[str, ...]:
    """The arguments of an overload that are dimensions: by their names, or because its rule says so."""
    rule = registry.get(op)
    stated = rule.slices.dim if rule is not None and rule.slices is not None else None
    return tuple(a.name for a in op._schema.arguments if a.name in DIMENSIONS or a.name == stated)


def _keeps(op: OpOverload) -> tuple[str, ...]:
    rule = registry.get(op)
    return (*KEEPS, rule.slices.keepdim) if rule is not None and rule.slices is not None else KEEPS


def only_operand(c: Call) -> str:
    """The name of the only tensor argument; NoOracle if there are more: the schema doesn't say how they correspond."""
    names = [a.name for a in c.op._schema.arguments if a.name in c and isinstance(c[a.name], Expected)]
    if len(names) != 1 or len(c.operands()) != 1:
        raise NoOracle(f"{c.name} of {len(c.operands())} tensors: its schema does not say how they correspond")
    return names[0]


def _argument(c: Call, names: Sequence[str]) -> str | None:
    return next((a.name for a in c.op._schema.arguments if a.name in names), None)


def _first_dimension(c: Call, name: str) -> int | list[int]:
    """Dimension 0, in the argument's type."""
    (kind,) = (str(a.type) for a in c.op._schema.arguments if a.name == name)
    return [0] if "List" in kind else 0


# The oracle of an operator follows from the category that its rule claims.
BY_CATEGORY: dict[str, Oracle] = {
    "elementwise": pointwise.elementwise,
    "movement": positions.movement,
    "join": positions.movement,
    "reduction": own_reduction,
    "scan": own_scan,
    "normalization": normalization,
    "contraction": contraction,
    "whole slices": whole_slices,
    "opaque": pointwise.opaque,
    "refused": pointwise.refused,
    "random": pointwise.as_torch_under_the_input,
}


# ----------------------------------------------------------------------------------------------------------------------
# Reductions, scans, softmax and sorting: plain torch on each slice with its invalid elements removed.

# Plain torch's result for the valid elements of one slice.
OfSlice = Callable[[Tensor], Results]


def on_values(one: OfSlice, indices: Sequence[int]) -> Callable[[Group], Results]:
    """`one` on a group's values. The outputs in `indices` are indices, which are mapped to the whole group."""

    def of_group(group: Group) -> Results:
        results = one(group.values[0])
        if not indices:
            return results
        outs = [results] if isinstance(results, Tensor) else results
        mapped = [in_whole_group(group, out) if n in indices else out for n, out in enumerate(outs)]
        return mapped[0] if isinstance(results, Tensor) else mapped

    return of_group


def in_whole_group(group: Group, index: Tensor) -> Tensor:
    """Indices among the valid elements as indices in the group; one that names none names none there."""
    kept, none = len(group.kept), torch.where(index < 0, index, index + (group.size - len(group.kept)))
    return torch.where((index >= 0) & (index < kept), group.kept[index.clamp(0, kept - 1)], none)


def reduce_slices(
    c: Call,
    one: OfSlice,
    *,
    operand: str = "self",
    dims: Sequence[int] | None = None,
    indices: Sequence[int] = (),
    least: int = 1,
) -> Any:
    """`one` on the valid elements of each slice; see :func:`reduce_groups` for `least`.

    `indices` are the outputs that are indices into the slice.
    """
    x = c[operand]
    over = range(x.ndim) if dims is None else dims
    return reduce_groups(groups([x], slices(x.shape, over)), on_values(one, indices), c.plain(), least)


# Composites, whose rules are of no category.
oracle("nanmean special_logsumexp frobenius_norm")(own_reduction)


@oracle("kthvalue")
def kthvalue(c: Call) -> Any:
    """Valid where at least k elements are. Among equal elements, torch may return any index."""
    k = c["k"]

    def kth(values: Tensor) -> tuple[Tensor, ...]:
        value, index = c.op(values, k, 0)
        if int((values == value).sum()) > 1:
            raise NoOracle("which of equal elements kthvalue names")
        return value, index

    return reduce_slices(c, kth, dims=c.dims(c["self"].ndim), indices=(1,), least=k)


@oracle("quantile", "nanquantile", "quantile.scalar", "nanquantile.scalar")
def quantile(c: Call) -> Any:
    """One call for each slice; several q's are the first dimension of the result."""
    x, q = c["self"], c["q"]
    wanted = q.data if isinstance(q, Expected) else torch.tensor(q, dtype=x.data.dtype)
    if isinstance(q, Expected) and not q.all_valid:
        raise NoOracle("quantile with an invalid q")

    def one(values: Tensor) -> Tensor:
        return c.op._overloadpacket(values, wanted, interpolation=c["interpolation"])

    return reduce_slices(c, one, dims=c.dims(x.ndim))


@oracle("trace")
def trace(c: Call) -> Any:
    """The sum over the diagonal."""
    diagonal, out = c["self"].map(Tensor.diagonal), c.plain()
    whole = slices(diagonal.shape, [0])
    return reduce_groups(groups([diagonal], whole), lambda group: group.values[0].sum(dtype=out.dtype), out)


# ------------------------------------------------------------------------------------------------ scans, softmax


def map_slices(c: Call, one: OfSlice, dim: int, indices: Sequence[int] = (), operand: str = "self") -> Any:
    """`one` on the valid elements along `dim`, whose results replace them; valid where the input is."""
    x, plain = c[operand], c.plain()
    if x.ndim == 0:
        return Expected(plain, x.mask) if isinstance(plain, Tensor) else tuple(Expected(p, x.mask) for p in plain)
    return map_groups(groups([x], slices(x.shape, [dim % x.ndim])), on_values(one, indices), plain, x.mask)


@oracle("vander")
def vander(c: Call) -> Expected:
    """The powers of each element alone. Power 0, in the first column or the last, reads nothing."""
    x, columns = c["x"], c["x"].data.numel() if c.get("N") is None else c["N"]
    powers = range(columns) if c.get("increasing") else range(columns - 1, -1, -1)
    wide = torch.promote_types(x.data.dtype, torch.int64)
    rows = [[v**power if power else torch.ones_like(v) for power in powers] for v in x.data.to(wide)]
    data = torch.stack([v for row in rows for v in row]) if columns and rows else torch.empty(0, dtype=wide)
    mask = [[power == 0 or known for power in powers] for known in x.mask.tolist()]
    return Expected(data.reshape(len(rows), columns), torch.tensor(mask, dtype=torch.bool).reshape(len(rows), columns))


# --------------------------------------------------------------------------------------------------------- sorting


def sort_slices(c: Call, one: Callable[[Tensor], tuple[Tensor, ...]], dim: int, outputs: Sequence[int]) -> Any:
    """`one` sorts the valid elements of a slice: (values, indices). They come first, and the tail is invalid.

    outputs  for each output of the operator, 0 (values) or 1 (indices into the whole slice)
    """
    x, plain = c["self"], c.plain()
    outs = [plain] if isinstance(plain, Tensor) else list(plain)
    if x.ndim == 0:
        expected = [Expected(out, x.mask.expand(out.shape)) for out in outs]
        return expected[0] if isinstance(plain, Tensor) else tuple(expected)
    dim %= x.ndim
    mask = torch.zeros(outs[0].numel(), dtype=torch.bool)
    written: list[Tensor] = []
    pieces: list[list[Tensor]] = [[] for _ in outs]
    for group, target in zip(groups([x], slices(x.shape, [dim])), slices(outs[0].shape, [dim]), strict=True):
        if not len(group.kept):
            continue
        values, index = one(group.values[0])
        count = min(len(values), len(target))
        written.append(target[:count])
        mask[target[:count]] = True
        for parts, output in zip(pieces, outputs, strict=True):
            parts.append(group.kept[index[:count]] if output == 1 else values[:count])
    mask = mask.reshape(outs[0].shape)
    expected = [
        Expected(scatter_back(out.shape, written, parts, out.dtype), mask)
        for out, parts in zip(outs, pieces, strict=True)
    ]
    return expected[0] if isinstance(plain, Tensor) else tuple(expected)


@oracle("sort", "argsort", "msort")
def sort(c: Call) -> Any:
    """A stable sort, so that equal elements keep their order; if all are valid, torch's own order."""
    if c["self"].all_valid:
        return all_outputs_valid(c.plain())
    descending, dim = c.get("descending", False), c.get("dim", 0)
    outputs = {"sort": (0, 1), "argsort": (1,), "msort": (0,)}[c.name]
    return sort_slices(c, lambda v: torch.sort(v, dim=0, descending=descending, stable=True), dim, outputs)


@oracle("topk")
def topk(c: Call) -> Any:
    """The largest (or smallest) k of the valid elements, in the stable order."""
    if c["self"].all_valid:
        return all_outputs_valid(c.plain())
    k, largest = c["k"], c["largest"]

    def first(v: Tensor) -> tuple[Tensor, ...]:
        values, index = torch.sort(v, dim=0, descending=largest, stable=True)
        return values[:k], index[:k]

    return sort_slices(c, first, c["dim"], (0, 1))
