"""What is said of neighbours and of pairs: differences, products across, covariances, distances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.oracles.slots import Call, NoOracle, Slot, all_true, broadcast_valid, lines, oracle, valid

aten = torch.ops.aten


@oracle("diff")
def diff(c: Call) -> Slot:
    """Valid where every element read is: a difference of order n reads n + 1 neighbours."""
    x, dim = c["self"], c["dim"]
    parts = [c["prepend"], x, c["append"]]
    mask = (
        torch.cat([p.mask for p in parts if p is not None], dim)
        if any(p is not None for p in (parts[0], parts[2]))
        else x.mask
    )
    out = c.plainly()
    if not c["n"]:
        return Slot(out, x.mask)
    for _ in range(c["n"]):
        if mask.shape[dim] == 0:
            break
        n = mask.shape[dim] - 1
        mask = mask.narrow(dim, 0, n) & mask.narrow(dim, 1, n)
    return Slot(out, mask.reshape(out.shape))


@oracle("cross", "linalg_cross")
def cross(c: Call) -> Slot:
    """Component i reads the two others of both."""
    out = c.plainly()
    dim = c["dim"] if c["dim"] is not None else next(d for d, s in enumerate(c["self"].shape) if s == 3)
    mask = broadcast_valid(out.shape, [c["self"], c["other"]])
    return Slot(out, mask.roll(-1, dim) & mask.roll(-2, dim))


@oracle("trapezoid", "trapz", "cumulative_trapezoid")
def trapezoid(c: Call) -> Slot:
    """The sum of the intervals whose ends are both valid; as a reduction (or a scan over valid intervals)."""
    y, dim = c["y"], c["dim"]
    out = c.plainly()
    n = y.shape[dim]
    if n < 2:
        return valid(out)
    if isinstance(c.get("x"), Slot):
        x = c["x"]
        if x.ndim == 1 and y.ndim != 1:
            shape = [1] * y.ndim
            shape[dim] = n
            x = Slot(x.data.reshape(shape), x.mask.reshape(shape))
        shape = torch.broadcast_shapes(x.shape, y.shape)
        xd, xm = x.data.expand(shape), x.mask.expand(shape)
        yd, ym = y.data.expand(shape), y.mask.expand(shape)
        width = xd.narrow(dim, 1, n - 1) - xd.narrow(dim, 0, n - 1)
    else:
        xm = all_true(y.data)
        yd, ym = y.data, y.mask
        width = torch.as_tensor(c.get("dx", 1))
    both = ym & xm
    interval = (yd.narrow(dim, 1, n - 1) + yd.narrow(dim, 0, n - 1)) * width / 2
    known = both.narrow(dim, 1, n - 1) & both.narrow(dim, 0, n - 1)
    parts = torch.where(known, interval, torch.zeros((), dtype=interval.dtype))
    if c.name == "cumulative_trapezoid":
        return Slot(parts.cumsum(dim).to(out.dtype), known)
    return Slot(parts.sum(dim).to(out.dtype), known.any(dim))


@oracle("cov", "corrcoef")
def cov(c: Call) -> Slot:
    """Pairwise complete observations: each entry from the columns that are valid in both rows."""
    x = c["self"]
    weights = {name: c[name] for name in ("fweights", "aweights") if isinstance(c.get(name), Slot)}
    if not all(w.all_valid for w in weights.values()):
        raise NoOracle("cov with invalid weights")
    out = c.plainly()
    data = x.data.to(out.dtype)  # of two rows torch takes no wider weights
    data = data.reshape(-1, x.shape[-1]) if x.ndim else data.reshape(1, 1)
    mask = x.mask.reshape(data.shape)
    rows: list[Tensor] = []
    known = []
    for i in range(len(data)):
        for j in range(len(data)):
            both = mask[i] & mask[j]
            known.append(bool(both.any()) or not mask.shape[1])
            pair = torch.stack([data[i][both], data[j][both]])
            if not known[-1] or not mask.shape[1]:
                rows.append(out.reshape(-1)[len(rows)])
            else:
                rows.append(c.plainly({"self": pair, **{n: w.data[both] for n, w in weights.items()}})[0, 1])
    if not rows:
        return valid(out)
    return Slot(torch.stack(rows).reshape(out.shape), torch.tensor(known).reshape(out.shape))


@oracle("dist", "pairwise_distance", "cosine_similarity", "cdist", "_pdist_forward", "pdist")
def distance(c: Call) -> Slot:
    """Over the coordinates that are valid in both."""
    if c.name == "dist":
        pairs = [(c["self"], c["other"])]
        shape = torch.broadcast_shapes(c["self"].shape, c["other"].shape)
        a, b = (Slot(s.data.expand(shape).reshape(-1), s.mask.expand(shape).reshape(-1)) for s in pairs[0])
        return _pairs(c, [(a, b)], lambda x, y: aten.dist(x, y, c["p"]))
    if c.name in ("cosine_similarity", "pairwise_distance"):
        x1, x2 = c["x1"], c["x2"]
        shape = torch.broadcast_shapes(x1.shape, x2.shape)
        dim = c.get("dim", -1) % max(len(shape), 1) if shape else 0
        spread = [Slot(s.data.expand(shape), s.mask.expand(shape)) for s in (x1, x2)]
        ats = list(lines(shape, [dim] if shape else []))
        chosen = [tuple(Slot(s.data.reshape(-1)[at], s.mask.reshape(-1)[at]) for s in spread) for at in ats]
        if c.name == "cosine_similarity":
            return _pairs(c, chosen, lambda x, y: aten.cosine_similarity(x, y, 0, c["eps"]))
        return _pairs(c, chosen, lambda x, y: aten.pairwise_distance(x, y, c["p"], c["eps"]))
    if c.name == "cdist":
        a, b = c["x1"], c["x2"]
        lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        spread = [Slot(s.data.expand(*lead, *s.shape[-2:]), s.mask.expand(*lead, *s.shape[-2:])) for s in (a, b)]
        if not a.data.numel() or not b.data.numel():
            return valid(c.plainly())
        rows = [Slot(s.data.reshape(-1, *s.shape[-2:]), s.mask.reshape(-1, *s.shape[-2:])) for s in spread]
        chosen = [
            (
                Slot(rows[0].data[k, i], rows[0].mask[k, i]),
                Slot(rows[1].data[k, j], rows[1].mask[k, j]),
            )
            for k in range(len(rows[0].data))
            for i in range(a.shape[-2])
            for j in range(b.shape[-2])
        ]
        return _pairs(c, chosen, lambda x, y: torch.linalg.vector_norm(x - y, c["p"]))
    x = c["self"]
    chosen = [
        (Slot(x.data[i], x.mask[i]), Slot(x.data[j], x.mask[j]))
        for i in range(len(x.data))
        for j in range(i + 1, len(x.data))
    ]
    return _pairs(c, chosen, lambda u, v: torch.linalg.vector_norm(u - v, c["p"]))


def _pairs(c: Call, pairs: Sequence[Any], one: Callable[[Tensor, Tensor], Tensor]) -> Slot:
    out = c.plainly()
    values, known = [], []
    for k, (a, b) in enumerate(pairs):
        both = a.mask & b.mask
        some = bool(both.any())
        known.append(some or not both.numel())
        values.append(one(a.data[both], b.data[both]) if some else out.reshape(-1)[k])
    if not values:
        return valid(out)
    return Slot(torch.stack(values).reshape(out.shape).to(out.dtype), torch.tensor(known).reshape(out.shape))
