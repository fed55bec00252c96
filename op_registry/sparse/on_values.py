"""Lowerings that run the rule itself on stored values, element by element or row by row; and those that are composed.

*Elementwise.* An element of the result depends on the elements of the operands at the same coordinates. So the rule
runs on the values of one sparse operand, the *lead*, and on those of the other operands at its coordinates. The result
has the lead's pattern: an element that is absent from one operand is invalid in the result. That is why exp, cos and
division stay sparse.

*By rows.* Along a batch dimension, an operator treats every index by itself. So where all sparse dimensions of an
operand are batch, the rule itself runs on the stored values, with one dimension of rows in place of the sparse ones,
and its result is shown as the operand was. An absent row has nothing valid, and neither has its result. Other operands
may have the sparse dimensions too if each of their dimensions is batch, as those of an operand that is added: their
elements at the stored rows take part.

*Composed.* Lowerings call other operators on records:

    call            an operator: by its lowering if a record is sparse, else by its dense rule
    call_broadcast  an elementwise operator of two records that broadcast
    broadcast_to    a sparse record expanded to a larger shape
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.autocast import autocast_on
from op_registry.bound import Bound
from op_registry.dimensions.labels import Labels
from op_registry.dimensions.sizes import known_to_hold
from op_registry.records.arguments import Dims, shape_alone
from op_registry.records.dense import Dense, map_tensors, valid_in_all
from op_registry.registry import registry
from op_registry.rule import Rule
from op_registry.sparse.convert import elements_at, expand_sparse
from op_registry.sparse.lowering import OnCall, planned, run_sparsely
from op_registry.sparse.permuted import RECORDS, AnyRecord, Permuted, first_permuted, to_base_order, to_dense
from op_registry.sparse.record import NotLowered, Sparse


def on_values(c: Bound) -> Any:
    """The rule on the values of one sparse operand and those of the other operands at its coordinates."""
    if "dim" in c.named or "dims" in c.named:
        raise NotLowered("its elements read their neighbours")
    if torch.Tag.nondeterministic_seeded in c.op.tags:
        raise NotLowered("it draws a random number for every element, stored or not")
    lead = lead_operand(records_among(list(c.named.values())))
    args, kwargs = c.given
    if kwargs.get("memory_format") is not None:
        # Memory formats are those of dense tensors and do not apply to values; this raises torch's errors.
        shape_alone(lead.shape).clone(memory_format=kwargs["memory_format"])
        kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}

    def aligned(record: Dense | Sparse) -> Dense:
        return align_to(record, lead)

    values = [map_tensors(aligned, a, (Dense, Sparse)) for a in args]
    named = {name: map_tensors(aligned, v, (Dense, Sparse)) for name, v in kwargs.items()} if kwargs else {}
    return map_tensors(lead.like, c.rule.bind(c.op)(*values, **named), Dense)


def on_permuted_values(c: Bound) -> Any:
    """`on_values` for dense dimensions before sparse ones, after permuting every operand to the order of the base."""
    permuted = first_permuted(list(c.named.values()))
    restored = c.map(lambda record: to_base_order(record, permuted), RECORDS)
    return map_tensors(permuted.like, on_values(restored), Sparse)


ON_VALUES, ON_PERMUTED_VALUES = OnCall(on_values), OnCall(on_permuted_values)


def lead_operand(records: Sequence[Dense | Sparse]) -> Sparse:
    """The sparse operand that has the broadcast shape, or the first one that expands to it; NotLowered if none does."""
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
            return expand_sparse(record, shape)
    raise NotLowered(f"no sparse operand has the shape of the result, {tuple(shape)}")


def records_among(values: Sequence[Any]) -> list[Dense | Sparse]:
    """Every record among arguments, dense or sparse, including those in lists."""
    records: list[Dense | Sparse] = []
    map_tensors(records.append, list(values), (Dense, Sparse))
    return records


def align_to(record: Dense | Sparse, lead: Sparse) -> Dense:
    """The elements of a record at the coordinates that `lead` stores, shaped to broadcast with `lead.values`."""
    pattern, dense = lead.pattern, len(lead.dense_sizes)
    if isinstance(record, Sparse):
        if record.ndim <= dense:
            return to_dense(record)  # broadcasts with dense dimensions only, and is no larger than one value of `lead`
        if len(record.dense_sizes) != dense:
            raise NotLowered("two operands are sparse in different dimensions")
        if record.pattern.same_as(pattern):
            return record.values
        return elements_at(record, pattern.coordinates()[pattern.ndim - record.pattern.ndim :]).map(pattern.fold)
    if record.ndim <= dense:
        # Broadcasts as it is. A 0-d tensor stays 0-d, since torch's type promotion counts only its category.
        return record
    sparse = record.ndim - dense  # the number of its dimensions that broadcast with sparse ones
    sizes = record.shape[:sparse]
    if all(size == 1 for size in sizes):
        return record.map(lambda t: t.reshape((1,) * pattern.lead + tuple(t.shape[sparse:])))
    coordinates = pattern.coordinates()[pattern.ndim - sparse :]
    if len(coordinates) != sparse:
        raise NotLowered(f"a dense operand of shape {tuple(record.shape)} has more dimensions than the sparse one")
    return elements_at(record, coordinates).map(pattern.fold)


# ----------------------------------------------------------------------------------------------------------- row by row

# What an operator does along a dimension, by its role.
DOES = {"contracted": "contracts", "reduced": "reduces", "front": "orders", "window": "reads windows along"}


class Rows(NamedTuple):
    """The plan of a call on rows.

    lead    the name of the sparse operand whose rows they are
    inner   how many of its last dimensions make up a row
    worked  dimensions of operands that the rule works along, counted from the last; none may be empty
    dims    arguments that name dimensions, counted from the last one
    others  operands that begin with sparse dimensions of the lead: which these are, and why each index of them cannot
            have its own such operand
    """

    lead: str
    inner: int
    worked: list[tuple[str, int]]
    dims: dict[str, Any]
    others: dict[str, tuple[list[int], str | None]]


def on_stored_rows(c: Bound) -> Any:
    """The rule on the stored values of its sparse operand."""
    plan, named = rows_of_call(c), c.named
    x = named[plan.lead]
    base = x.base if isinstance(x, Permuted) else x
    changed = {**plan.dims, plan.lead: base.flat}
    for name, d in plan.worked:
        if known_to_hold(changed.get(name, named[name]).shape[d] == 0):
            raise NotLowered(f"it works along an empty dimension of its operand `{name}`")
    for other, beside in plan.others.items():
        changed[other] = at_rows(named[other], base, f"its operands `{plan.lead}` and `{other}`", *beside)
    result = c.run_with(changed)
    if isinstance(result, (tuple, list)):
        return type(result)(shown(r, x, plan.inner) for r in result)
    return shown(result, x, plan.inner)


@planned
def rows_of_call(c: Bound, labels: Labels | None) -> Rows:
    """Which operand's rows the rule runs on, and what takes the place of the others."""
    dims = c.rule.dims
    if labels is None or dims is None:
        raise NotLowered("its rule does not say which dimensions it works on in this call")
    name, x = lead_of(c, labels)
    base, inner = (x.base, labels.row_of(name)) if isinstance(x, Permuted) else (x, x.ndim - x.pattern.ndim)
    own, outside = labels.operands[name], x.ndim - inner
    refuse_along(labels, name, x, outside)
    worked: list[tuple[str, int]] = []
    others: dict[str, tuple[list[int], str | None]] = {}
    ranks = {name: SimpleNamespace(ndim=1 + base.ndim - base.pattern.ndim)}
    for other, y in c.tensors.items():
        theirs = labels.operands.get(other)
        if theirs is None:
            raise NotLowered(f"its rule does not say which dimensions its operand `{other}` has")
        roles = [d - len(theirs) for d, label in enumerate(theirs) if labels.role_of(label)]
        worked += [(other, d) for d in roles]
        if other == name:
            continue
        here = [own.index(label) for label in theirs if label in own[:outside]]
        if isinstance(y, Permuted) or (isinstance(y, Sparse) and not here):
            raise NotLowered(f"its operands `{name}` and `{other}` are sparse in different dimensions")
        if not here:
            continue
        if any(label in own[:outside] for label in theirs[len(here) :]):
            raise NotLowered("its operands have the sparse dimensions in different places")
        of_each = f"of its operand `{name}`, which is sparse here, has its own `{other}`"
        others[other] = here, of_each if roles or isinstance(x, Permuted) else None
        ranks[other] = SimpleNamespace(ndim=1 + y.ndim - len(here))
    named = dims.from_the_end(c.named)
    of_rows = dims.labels(c.op, named | ranks)
    if of_rows is None or any(result[:1] != of_rows.operands[name][:1] for result in of_rows.results):
        raise NotLowered(f"it does not take the stored rows of its operand `{name}` in place of dimensions")
    return Rows(name, inner, worked, {n: v for n, v in named.items() if v is not c.named[n]}, others)


def lead_of(c: Bound, labels: Labels) -> tuple[str, Sparse | Permuted]:
    """The sparse operand on whose rows to run, and its name: one that is more than added, if there is one."""
    stored = {name: x for name, x in c.tensors.items() if isinstance(x, (Sparse, Permuted)) and name in labels.operands}
    name = next((n for n in stored if n not in labels.added), None) or next(iter(stored), None)
    if name is None:
        raise NotLowered("an operand whose dimensions its rule does not state is sparse")
    return name, stored[name]


def refuse_along(labels: Labels, name: str, x: Sparse | Permuted, outside: int) -> None:
    """NotLowered if the rule works along one of the first dimensions of an operand, or the others are not its last."""
    own = labels.operands[name]
    for d, label in enumerate(own[:outside]):
        if (role := labels.role_of(label)) is not None:
            does = DOES.get(role, "works along")
            raise NotLowered(f"it {does} dimension {d} of its operand `{name}`, which is sparse here")
    if isinstance(x, Permuted):
        first = x.base.ndim - x.ndim + outside
        for n, place in enumerate(x.order[len(x.order) - x.ndim + outside :]):
            if place != first + n or place < x.base.pattern.ndim:
                role = labels.role_of(own[outside + n])
                does = "combines with another operand" if role is None else DOES.get(role, "works along")
                where = f"dimension {outside + n} of its operand `{name}`, which stands before sparse ones"
                raise NotLowered(f"it {does} {where}")


def at_rows(y: Dense | Sparse, base: Sparse, both: str, outside: list[int], why_not: str | None) -> Dense:
    """The elements at the stored rows, (rows or 1, …), of an operand that begins with the dimensions `outside`."""
    wide = [d for n, d in enumerate(outside) if not known_to_hold(y.shape[n] == 1)]
    if isinstance(y, Sparse) and y.pattern.ndim != len(wide):
        raise NotLowered(f"{both} are sparse in different dimensions")
    if wide and why_not is not None:
        raise NotLowered(f"each index of dimension {wide[0]} {why_not}")
    if not wide and isinstance(y, Dense):
        return y.map(lambda t: t.reshape(1, *t.shape[len(outside) :]))
    coordinates = base.pattern.coordinates()
    return elements_at(y, tuple(coordinates[d] for d in outside))


def shown(result: Any, x: Sparse | Permuted, inner: int) -> Any:
    """Results for rows as a record that is shown as `x` is, up to its last `inner` dimensions."""
    if not isinstance(result, Dense):
        return result
    base = x.base if isinstance(x, Permuted) else x
    stored = base.like(result) if base.pattern.block is None else base.folded(result)
    if not isinstance(x, Permuted):
        return stored
    outer = base.ndim - inner
    return Permuted(stored, (*x.order[:outer], *range(outer, stored.ndim)))


ON_STORED_ROWS = OnCall(on_stored_rows, of_dims=True)


# ------------------------------------------------------------------------------------------ composed of other operators

aten = torch.ops.aten


def call(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """An operator on records by its built-in rule: by its lowering if one of them is sparse, else densely."""
    rule = registry.written(op)
    if rule is None:
        raise NotLowered(f"{op} has no rule")
    sparse: list[Sparse | Permuted] = []
    map_tensors(sparse.append, [*args, *kwargs.values()], (Sparse, Permuted))
    if sparse:
        return run_sparsely(op, rule, args, kwargs)
    return rule.bind(op)(*args, **kwargs)


def refuse_permuted(*records: AnyRecord | None) -> None:
    """NotLowered if a record has dense dimensions before sparse ones."""
    if any(isinstance(r, Permuted) for r in records):
        raise NotLowered("an operand has dense dimensions before sparse ones")


def broadcast_to(x: AnyRecord, shape: Sequence[int]) -> Any:
    """A sparse record expanded to a shape; a dense one unchanged, since torch broadcasts it."""
    return expand_sparse(x, shape) if isinstance(x, Sparse) and tuple(x.shape) != tuple(shape) else x


def call_broadcast(op: OpOverload, x: AnyRecord, y: AnyRecord, **kwargs: Any) -> Any:
    """An elementwise operator of two records that broadcast."""
    refuse_permuted(x, y)
    if isinstance(x, Dense) and isinstance(y, Dense):
        return call(op, x, y, **kwargs)
    shape = torch.broadcast_shapes(x.shape, y.shape)
    return call(op, broadcast_to(x, shape), broadcast_to(y, shape), **kwargs)


def slice_of(x: AnyRecord, dim: int, start: int, end: int) -> Any:
    """The record from `start` to before `end` along `dim`."""
    return call(aten.slice.Tensor, x, dim, start, end, 1)


def require_float(*records: AnyRecord) -> None:
    """NotLowered unless all records are float32 or float64: for other dtypes, torch's rules are in the dense rule."""
    if any(r.dtype not in (torch.float32, torch.float64) for r in records):
        raise NotLowered("it is computed in another dtype")
    if autocast_on(records[0].device):
        raise NotLowered("autocast chooses another dtype")


def distance(x: AnyRecord, y: AnyRecord, p: float, dim: Dims, eps: float = 0) -> Dense:
    """The p-norm of ``x - y + eps`` over the elements that are valid in both."""
    require_float(x, y)
    difference = call_broadcast(aten.sub.Tensor, x, y)
    values = difference.values if isinstance(difference, Sparse) else difference
    # 1 where nothing is common: there a norm has a finite derivative, so that its 0 reaches both operands as 0.
    shifted = values.like(values.filled(1) + eps if eps else values.filled(1))
    difference = difference.like(shifted) if isinstance(difference, Sparse) else shifted
    return to_dense(call(aten.linalg_vector_norm.default, difference, p, dim))  # one number per row


def joint_sums(x: Dense | Sparse, y: Dense | Sparse, dim: int) -> tuple[Dense, Dense, Dense]:
    """Σxy, Σx² and Σy² over the coordinates that are valid in both."""
    refuse_permuted(x, y)
    require_float(x, y)
    shape = torch.broadcast_shapes(x.shape, y.shape)
    if 0 in shape or not -len(shape) <= dim < len(shape):
        raise NotLowered("torch refuses it, or it is empty")
    x, y = broadcast_to(x, shape), broadcast_to(y, shape)
    lead = lead_operand([x, y])
    a, b = (align_to(r, lead) for r in (x, y))
    joint = valid_in_all(a, b)
    a, b = (Dense(Dense(r.data.expand(lead.values.shape), joint).filled(0)) for r in (a, b))

    def total(t: Tensor) -> Dense:
        result = to_dense(call(aten.sum.dim_IntList, lead.like(Dense(t, joint)), [dim]))
        return Dense(result.filled(0), result.validity)

    return total(a.data * b.data), total(a.data * a.data), total(b.data * b.data)


def lowers(rule: Rule, *records: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the rule's lowering for sparse records, or for `records`, a function of the operator's arguments
    without the overload.

    Refuses calls whose first argument (each record of it, if it is a list) is another record.
    """
    kinds = records or (Sparse,)

    def decorator(function: Callable[..., Any]) -> Callable[..., Any]:
        def lowering(op: OpOverload, x: AnyRecord | Sequence[AnyRecord], *args: Any, **kwargs: Any) -> Any:
            if not (isinstance(x, kinds) or (isinstance(x, (list, tuple)) and all(isinstance(r, kinds) for r in x))):
                raise NotLowered("an operand whose elements would be moved is stored densely")
            return function(x, *args, **kwargs)

        for kind in kinds:
            rule.lowering(kind)(lowering)
        return function

    return decorator


def select_along(x: Sparse, indices: dict[int, Tensor]) -> Sparse:
    """index_select along several dimensions, with an index for each."""
    for dim, index in indices.items():
        x = call(aten.index_select.default, x, dim, Dense(index))
    return x


def map_dense_dim(x: Sparse, dim: int, move: Callable[[Tensor, int], Tensor]) -> Sparse:
    """`move`, a function of a tensor and a dimension, applied to the values along one dense dimension."""
    return x.like(x.values.map(lambda t: move(t, dim - x.pattern.ndim + x.pattern.lead)))
