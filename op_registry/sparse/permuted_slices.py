"""Operators on permuted sparse records that are the same call on the record that is shown.

Law: as slicewise.py. A slice over some dimensions consists of the same elements whatever the order of dimensions, so
the operator runs on the base, over the dimensions that those show. Operators whose result depends on the order of the
elements of a slice (scans, sorts, positions) do so for slices over one dimension. A move along one dimension is the
same move along that dimension of the base.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from op_registry.bound import Bound
from op_registry.dimensions.slices import LastDims, Slices
from op_registry.records.dense import Dense, map_tensors
from op_registry.records.dims import wrap_dim
from op_registry.sparse.lowering import OnCall, run_sparsely
from op_registry.sparse.permuted import Permuted, shown_as
from op_registry.sparse.record import NotLowered, Sparse


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
