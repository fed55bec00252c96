"""A rule on the stored rows of a sparse operand, by the dimensions that it states.

Along a batch dimension, an operator treats every index by itself. So where all sparse dimensions of an operand are
batch, the rule itself runs on the stored values, with one dimension of rows in place of the sparse ones, and its result
is shown as the operand was. An absent row has nothing valid, and neither has its result.

Other operands may have the sparse dimensions too if each of their dimensions is batch, as those of an operand that is
added: their elements at the stored rows take part.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

from op_registry.bound import Bound
from op_registry.dimensions.labels import Labels
from op_registry.dimensions.sizes import known_to_hold
from op_registry.records.dense import Dense
from op_registry.sparse.elements import elements_at
from op_registry.sparse.lowering import OnCall
from op_registry.sparse.permuted import Permuted
from op_registry.sparse.plans import planned
from op_registry.sparse.record import NotLowered, Sparse

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
    found = dims.labels(c.op, named | ranks)
    if found is None or any(result[:1] != found.operands[name][:1] for result in found.results):
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
