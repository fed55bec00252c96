"""Slice operators on permuted sparse records: the same slices of the record that is shown.

Law: as slicewise.py. A slice over some dimensions consists of the same elements whatever the order of dimensions, so
the operator runs on the base, over the dimensions that those show. Operators whose result depends on the order of the
elements of a slice (scans, sorts, positions) do so for slices over one dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch._ops import OpOverload

from op_registry.bound import Bound, bind_by_name
from op_registry.dimensions.slices import LastDims, Slices
from op_registry.records.dense import Dense, map_tensors
from op_registry.rule import Rule
from op_registry.sparse.lowering import ForRule, run_sparsely
from op_registry.sparse.permuted import Permuted, order_of
from op_registry.sparse.record import NotLowered, Sparse


def on_base_dims(rule: Rule, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """The rule on the base, over its dimensions that the given ones show."""
    dims, named = rule.dims, bind_by_name(op, args, kwargs)
    labels = dims.labels(op, named) if isinstance(dims, (Slices, LastDims)) else None
    x, *others = named.values()
    if labels is None or not isinstance(x, Permuted) or any(isinstance(a, (Sparse, Permuted)) for a in others):
        raise NotLowered("only the first operand may be sparse")
    first = op._schema.arguments[0].name
    if any(isinstance(a, Dense) and not labels.belongs_to(first, name) for name, a in named.items()):
        raise NotLowered("another operand is dense")
    along = [d for d, label in enumerate(labels.operands[first]) if label in labels.roles]
    of_base = [d for visible in along for d in x.groups[visible]]
    call = Bound(rule, op, named).with_(**{first: x.base})
    if isinstance(dims, LastDims):
        if of_base != list(range(x.base.ndim - len(along), x.base.ndim)) or of_base[0] < x.base.pattern.ndim:
            raise NotLowered("the dimensions that it works on stand before sparse ones, or are sparse")
        return map_tensors(x.like, _run(call), Sparse)
    assert isinstance(dims, Slices)
    dim = None if dims.dim is None else named.get(dims.dim)
    if isinstance(dim, int) and len(of_base) > 1:
        raise NotLowered("it works along a dimension that is merged of others")
    if (dims.gives != "one" or dims.positions) and not isinstance(dim, int):
        raise NotLowered("its result depends on the order of elements in several dimensions")
    if dim is not None:
        call = call.with_(**{str(dims.dim): of_base[0] if isinstance(dim, int) else of_base})
    if dims.gives != "one":
        return map_tensors(x.like, _run(call), Sparse)
    if dims.keepdim not in call:
        if len(of_base) < x.base.ndim:
            raise NotLowered("it has no keepdim")
        return _run(call)  # one number
    keepdim = bool(call[dims.keepdim])
    return map_tensors(
        lambda r: _shown(r, x, along, keepdim), _run(call.with_(**{dims.keepdim: True})), (Dense, Sparse)
    )


def _run(call: Bound) -> Any:
    return call.applied(lambda *args, **kwargs: run_sparsely(call.op, call.rule, args, kwargs))


def _shown(reduced: Dense | Sparse, x: Permuted, along: Sequence[int], keepdim: bool) -> Any:
    """A reduction of the base that has kept its dimensions, shown as `x`."""
    groups = x.groups
    if isinstance(reduced, Sparse):
        return x.like(reduced) if keepdim else _without_dims(reduced, [groups[d] for d in along], x)
    listed = [d for group in groups for d in group]
    shape = [1 if d in along else size for d, size in enumerate(x.shape) if keepdim or d not in along]
    return reduced.map(lambda t: t.permute(listed).reshape(shape))


def _without_dims(reduced: Sparse, removed: Sequence[tuple[int, ...]], x: Permuted) -> Sparse | Permuted:
    """`reduced`, shown as `x` without some dense dimensions, which have size 1."""
    gone = {d for group in removed for d in group}
    lead = x.base.pattern.lead - x.base.pattern.ndim
    base = reduced.like(reduced.values.map(lambda t: t.squeeze([d + lead for d in gone])))
    groups = [tuple(d - sum(g < d for g in gone) for d in group) for group in x.groups if group not in removed]
    order = order_of(groups)
    return base if order == tuple(range(base.ndim)) else Permuted(base, order)


SLICEWISE_ON_BASE = ForRule(on_base_dims)
