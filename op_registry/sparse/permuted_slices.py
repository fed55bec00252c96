"""Slice operators on permuted sparse records: the same slices of the record that is shown.

Law: as slicewise.py. A slice over some dimensions consists of the same elements whatever the order of dimensions, so
the operator runs on the base, over the dimensions that those show. Operators whose result depends on the order of the
elements of a slice (scans, sorts, positions) do so for slices over one dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch._ops import OpOverload

from op_registry.records.dense import Dense, map_tensors
from op_registry.records.dims import wrap_dims
from op_registry.rule import Rule
from op_registry.sparse.lowering import ForRule, run_sparsely
from op_registry.sparse.permuted import Permuted, order_of
from op_registry.sparse.record import NotLowered, Sparse


def on_base_dims(rule: Rule, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """The rule on the base, over its dimensions that the given ones show."""
    names = [argument.name for argument in op._schema.arguments]
    named = dict(zip(names, args, strict=False)) | kwargs
    slices, x = rule.slices, named.pop(names[0])
    if slices is None or not isinstance(x, Permuted) or any(isinstance(a, (Sparse, Permuted)) for a in named.values()):
        raise NotLowered("only the first operand may be sparse")
    if any(isinstance(a, Dense) and a.ndim > 0 for a in named.values()):
        raise NotLowered("another operand is dense")
    dim = None if slices.dim is None else named.get(slices.dim, _default(op, slices.dim))
    along = range(x.ndim) if dim is None or dim == [] else wrap_dims(dim, x.ndim)
    if dim == [] and slices.none_for_no_dims:
        raise NotLowered("an empty list of dimensions reduces nothing")
    of_base = [d for visible in along for d in x.groups[visible]]
    in_order = slices.gives != "one" or bool(slices.positions)
    if in_order and (not isinstance(dim, int) or len(of_base) > 1):
        raise NotLowered("its result depends on the order of elements in several dimensions")
    if slices.dim in names and dim is not None:
        if isinstance(dim, int) and len(of_base) > 1:
            raise NotLowered("it works along a dimension that is merged of others")
        named[slices.dim] = of_base[0] if isinstance(dim, int) else of_base
    if slices.gives != "one":
        result = run_sparsely(op, rule, [x.base], named)
        return map_tensors(x.like, result, Sparse)
    if slices.keepdim not in names:
        if len(of_base) < x.base.ndim:
            raise NotLowered("it has no keepdim")
        return run_sparsely(op, rule, [x.base], named)  # one number
    keepdim = bool(named.get(slices.keepdim, False))
    result = run_sparsely(op, rule, [x.base], named | {slices.keepdim: True})
    return map_tensors(lambda r: _shown(r, x, along, keepdim), result, (Dense, Sparse))


def _default(op: OpOverload, name: str) -> Any:
    """The default of an argument; None if it has none."""
    defaults = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    return defaults.get(name)


def _shown(reduced: Dense | Sparse, x: Permuted, along: Sequence[int], keepdim: bool) -> Any:
    """A reduction of the base that has kept its dimensions, shown as `x`."""
    groups = x.groups
    if isinstance(reduced, Sparse):
        return x.like(reduced) if keepdim else _without_dims(reduced, [groups[d] for d in along], x)
    listed = [d for group in groups for d in group]
    sizes = [math.prod(reduced.shape[d] for d in group) for group in groups]
    shape = [size for d, size in enumerate(sizes) if keepdim or d not in along]

    def show(record: Dense) -> Dense:
        v = record.full_validity
        return Dense(
            record.data.permute(listed).reshape(shape),
            None if v is None else v.expand(record.shape).permute(listed).reshape(shape),
        )

    return show(reduced)


def _without_dims(reduced: Sparse, removed: Sequence[tuple[int, ...]], x: Permuted) -> Sparse | Permuted:
    """`reduced`, shown as `x` without some dense dimensions, which have size 1."""
    gone = {d for group in removed for d in group}
    lead = x.base.pattern.lead - x.base.pattern.ndim
    base = reduced.like(reduced.values.map(lambda t: t.squeeze([d + lead for d in gone])))
    groups = [tuple(d - sum(g < d for g in gone) for d in group) for group in x.groups if group not in removed]
    order = order_of(groups)
    return base if order == tuple(range(base.ndim)) else Permuted(base, order)


SLICEWISE_ON_BASE = ForRule(on_base_dims)
