"""Functions of neighbours and of pairs: differences, cross products, covariances, distances."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.oracles.call import (
    Call,
    Expected,
    NoOracle,
    broadcast_valid,
    oracle,
    valid,
)
from op_registry.conformance.oracles.engine import Group, groups, reduce_groups, slices

aten = torch.ops.aten


@oracle("diff")
def diff(c: Call) -> Expected:
    """Valid where every element read is valid: a difference of order n reads n + 1 neighbours."""
    x, dim = c["self"], c["dim"]
    parts = [part.mask for part in (c["prepend"], x, c["append"]) if part is not None]
    mask = torch.cat(parts, dim) if len(parts) > 1 else x.mask
    out = c.plain()
    if not c["n"]:
        return Expected(out, x.mask)
    for _ in range(c["n"]):
        if mask.shape[dim] == 0:
            break
        n = mask.shape[dim] - 1
        mask = mask.narrow(dim, 0, n) & mask.narrow(dim, 1, n)
    return Expected(out, mask.reshape(out.shape))


@oracle("cross", "linalg_cross")
def cross(c: Call) -> Expected:
    """Component i reads the two other components of both vectors."""
    out = c.plain()
    dim = c["dim"] if c["dim"] is not None else next(d for d, s in enumerate(c["self"].shape) if s == 3)
    mask = broadcast_valid(out.shape, [c["self"], c["other"]])
    return Expected(out, mask.roll(-1, dim) & mask.roll(-2, dim))


@oracle("trapezoid", "trapz", "cumulative_trapezoid")
def trapezoid(c: Call) -> Expected:
    """The sum of the intervals whose ends are both valid; as a reduction (or a scan over valid intervals)."""
    y, dim = c["y"], c["dim"]
    out = c.plain()
    n = y.shape[dim]
    if n < 2:
        return valid(out)
    if isinstance(c.get("x"), Expected):
        x = c["x"]
        if x.ndim == 1 and y.ndim != 1:
            shape = [1] * y.ndim
            shape[dim] = n
            x = _reshaped(x, shape)
        x, y = _expanded([x, y])
        width = x.data.narrow(dim, 1, n - 1) - x.data.narrow(dim, 0, n - 1)
    else:
        x = valid(y.data)
        width = torch.as_tensor(c.get("dx", 1))
    both = x.mask & y.mask
    interval = (y.data.narrow(dim, 1, n - 1) + y.data.narrow(dim, 0, n - 1)) * width / 2
    known = both.narrow(dim, 1, n - 1) & both.narrow(dim, 0, n - 1)
    terms = torch.where(known, interval, torch.zeros((), dtype=interval.dtype))
    if c.name == "cumulative_trapezoid":
        return Expected(terms.cumsum(dim).to(out.dtype), known)
    return Expected(terms.sum(dim).to(out.dtype), known.any(dim))


def _reshaped(x: Expected, shape: Sequence[int]) -> Expected:
    return x.map(lambda t: t.reshape(tuple(shape)))


def _expanded(operands: Sequence[Expected]) -> list[Expected]:
    """The operands, broadcast to one shape."""
    shape = torch.broadcast_shapes(*(x.shape for x in operands))
    return [x.map(lambda t: t.expand(shape)) for x in operands]


@oracle("cov", "corrcoef")
def cov(c: Call) -> Any:
    """Pairwise complete observations: each entry from the columns that are valid in both rows."""
    x = c["self"]
    weights = {name: c[name] for name in ("fweights", "aweights") if isinstance(c.get(name), Expected)}
    if not all(w.all_valid for w in weights.values()):
        raise NoOracle("cov with invalid weights")
    out = c.plain()
    # Convert the rows to the dtype of the result, to which wider weights promote it.
    rows = _reshaped(Expected(x.data.to(out.dtype), x.mask), (-1, x.shape[-1]) if x.ndim else (1, 1))

    def one(group: Group) -> Tensor:
        chosen = {name: weight.data[group.kept] for name, weight in weights.items()}
        matrix: Tensor = c.plain(self=torch.stack(group.values), **chosen)
        return matrix[0, 1]

    index = slices(rows.shape, [1])
    return reduce_groups(groups([rows, rows], itertools.product(list(index), repeat=2)), one, out)


# A distance of two vectors.
Distance = Callable[[Tensor, Tensor], Tensor]


def _distances(c: Call, operands: Sequence[Expected], pairs: Iterable[Sequence[Tensor]], one: Distance) -> Any:
    """`one` on the coordinates that are valid in both vectors of each pair."""
    return reduce_groups(groups(operands, pairs), lambda group: one(*group.values), c.plain())


@oracle("dist")
def dist(c: Call) -> Any:
    """Over the components that are valid in both."""
    operands = _expanded([c["self"], c["other"]])
    whole = torch.arange(operands[0].data.numel())
    return _distances(c, operands, [(whole, whole)], lambda x, y: aten.dist(x, y, c["p"]))


@oracle("pairwise_distance", "cosine_similarity")
def distance_along(c: Call) -> Any:
    """Over the components that are valid in both."""
    operands = _expanded([c["x1"], c["x2"]])
    ndim = operands[0].ndim
    dims = [c.get("dim", -1) % ndim] if ndim else []
    pairs = ((index, index) for index in slices(operands[0].shape, dims))
    if c.name == "cosine_similarity":
        return _distances(c, operands, pairs, lambda x, y: aten.cosine_similarity(x, y, 0, c["eps"]))
    return _distances(c, operands, pairs, lambda x, y: aten.pairwise_distance(x, y, c["p"], c["eps"]))


@oracle("cdist")
def cdist(c: Call) -> Any:
    """Every row of one matrix with every row of the other, over the coordinates that are valid in both."""
    a, b = c["x1"], c["x2"]
    if not a.data.numel() or not b.data.numel():
        return valid(c.plain())
    lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])

    def rows(matrices: Expected) -> Tensor:
        """(batches, rows, columns): flat indices into the matrices, broadcast."""
        index = torch.arange(matrices.data.numel()).reshape(matrices.shape)
        return index.expand(*lead, *matrices.shape[-2:]).reshape(-1, *matrices.shape[-2:])

    pairs = (pair for one, other in zip(rows(a), rows(b), strict=True) for pair in itertools.product(one, other))
    return _distances(c, [a, b], pairs, lambda x, y: torch.linalg.vector_norm(x - y, c["p"]))


@oracle("_pdist_forward", "pdist")
def pdist(c: Call) -> Any:
    """Every two rows, over the coordinates that are valid in both."""
    x = c["self"]
    pairs = itertools.combinations(slices(x.shape, [1]), 2)
    return _distances(c, [x, x], pairs, lambda u, v: torch.linalg.vector_norm(u - v, c["p"]))
