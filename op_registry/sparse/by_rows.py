"""A rule on the stored rows of a sparse operand, by the dimensions that it states.

Along a batch dimension, an operator treats every index by itself. So where all sparse dimensions of an operand are
batch, the rule itself runs on the stored values, with one dimension of rows in place of the sparse ones, and its result
is shown as the operand was. An absent row has nothing valid, and neither has its result.

Other operands may have the sparse dimensions too if each of their dimensions is batch, as those of an operand that is
added: their elements at the stored rows take part.
"""

from __future__ import annotations

from typing import Any

from op_registry.bound import Bound
from op_registry.dimensions import Dimension, Labels
from op_registry.records.dense import Dense
from op_registry.records.dims import known_to_hold
from op_registry.sparse.elementwise import elements_at
from op_registry.sparse.lowering import OnCall
from op_registry.sparse.permuted import Permuted
from op_registry.sparse.record import NotLowered, Sparse

# What an operator does along a dimension, by its role.
DOES = {"contracted": "contracts", "reduced": "reduces", "front": "orders", "window": "reads windows along"}


def on_stored_rows(c: Bound) -> Any:
    """The rule on the stored values of its sparse operand."""
    labels, dims = c.labels, c.rule.dims
    if labels is None or dims is None:
        raise NotLowered("its rule does not say which dimensions it works on in this call")
    name, x = lead_of(c, labels)
    base, inner = (x.base, labels.row_of(name)) if isinstance(x, Permuted) else (x, x.ndim - x.pattern.ndim)
    reason = misfit(c, labels, name, x, x.ndim - inner)
    if reason is not None:
        raise NotLowered(reason)
    outside = labels.operands[name][: x.ndim - inner]
    others = {n: at_rows(c[n], theirs, outside, base) for n, theirs in labels.operands.items() if n != name}
    rows = Bound(c.rule, c.op, dims.from_the_end(c.named) | others | {name: base.flat})
    found = rows.labels
    if found is None or any(result[:1] != found.operands[name][:1] for result in found.results):
        raise NotLowered(f"it does not take the stored rows of its operand `{name}` in place of dimensions")
    result = rows.run()
    if isinstance(result, (tuple, list)):
        return type(result)(shown(r, x, inner) for r in result)
    return shown(result, x, inner)


def lead_of(c: Bound, labels: Labels) -> tuple[str, Sparse | Permuted]:
    """The sparse operand on whose rows to run, and its name: one that is more than added, if there is one."""
    stored = {name: x for name, x in c.tensors.items() if isinstance(x, (Sparse, Permuted)) and name in labels.operands}
    name = next((n for n in stored if n not in labels.added), None) or next(iter(stored), None)
    if name is None:
        raise NotLowered("an operand whose dimensions its rule does not state is sparse")
    return name, stored[name]


def misfit(c: Bound, labels: Labels, name: str, x: Sparse | Permuted, outside: int) -> str | None:
    """Why the rule cannot run on rows of an operand whose first `outside` dimensions number them; None if it can."""
    own = labels.operands[name]
    for d, label in enumerate(own[:outside]):
        if (role := labels.role_of(label)) is not None:
            return f"it {DOES.get(role, 'works along')} dimension {d} of its operand `{name}`, which is sparse here"
    if isinstance(x, Permuted):
        first = x.base.ndim - x.ndim + outside
        for n, place in enumerate(x.order[len(x.order) - x.ndim + outside :]):
            if place != first + n or place < x.base.pattern.ndim:
                role = labels.role_of(own[outside + n])
                does = "combines with another operand" if role is None else DOES.get(role, "works along")
                return f"it {does} dimension {outside + n} of its operand `{name}`, which stands before sparse ones"
    for other, y in c.tensors.items():
        theirs = labels.operands.get(other)
        if theirs is None:
            return f"its rule does not say which dimensions its operand `{other}` has"
        if any(labels.role_of(label) and known_to_hold(y.shape[d] == 0) for d, label in enumerate(theirs)):
            return f"it works along an empty dimension of its operand `{other}`"
        if other == name:
            continue
        shared = [d for d, label in enumerate(theirs) if label in own[:outside] and not known_to_hold(y.shape[d] == 1)]
        if isinstance(y, Permuted) or (isinstance(y, Sparse) and y.pattern.ndim != len(shared)):
            return f"its operands `{name}` and `{other}` are sparse in different dimensions"
        if shared and (isinstance(x, Permuted) or any(labels.role_of(label) for label in theirs)):
            d = own.index(theirs[shared[0]])
            return f"each index of dimension {d} of its operand `{name}`, which is sparse here, has its own `{other}`"
    return None


def at_rows(y: Dense | Sparse, theirs: tuple[Dimension, ...], outside: tuple[Dimension, ...], base: Sparse) -> Dense:
    """The elements of another operand at the stored rows, (rows or 1, …); all of it if it has no sparse dimension."""
    here = [d for d, label in enumerate(theirs) if label in outside]
    if not here and isinstance(y, Dense):
        return y
    if here != list(range(len(here))):
        raise NotLowered("its operands have the sparse dimensions in different places")
    if isinstance(y, Dense) and all(known_to_hold(y.shape[d] == 1) for d in here):
        return y.map(lambda t: t.reshape(1, *t.shape[len(here) :]))
    coordinates = base.pattern.coordinates()
    return elements_at(y, tuple(coordinates[outside.index(theirs[d])] for d in here))


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
