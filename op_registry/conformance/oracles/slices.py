"""Reductions, scans, softmax and sorting: plain torch on each slice with its invalid elements removed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.oracles.slots import (
    Call,
    NoOracle,
    Refused,
    Slot,
    all_true,
    broadcast_valid,
    lines,
    oracle,
    scatter_back,
    valid,
)

aten = torch.ops.aten


def compressed(slot: Slot, at: Tensor) -> tuple[Tensor, Tensor]:
    """The valid elements of a slice, and their places in it."""
    kept = slot.mask.reshape(-1)[at].nonzero().reshape(-1)
    return slot.data.reshape(-1)[at][kept], kept


def reduce_by_slices(
    c: Call,
    one: Callable[[Tensor], Any],
    *,
    dims: Sequence[int] | None = None,
    indices: Sequence[int] = (),
    least: int = 1,
) -> Any:
    """`one` on each compressed slice: valid where `least` elements are, or where there were none to begin with.

    `indices` are the outputs that say where an element was: places in the uncompressed slice.
    """
    x = c["self"]
    reduced = tuple(range(x.ndim)) if dims is None else tuple(dims)
    plain = c.plainly()
    outs = [plain] if isinstance(plain, Tensor) else list(plain)
    pieces: list[list[Tensor]] = [[] for _ in outs]
    known: list[bool] = []
    for k, at in enumerate(lines(x.shape, reduced)):
        values, kept = compressed(x, at)
        enough = len(values) >= least
        known.append(enough or len(at) < least)
        if enough and len(at):
            results = one(values)
            results = [results] if isinstance(results, Tensor) else list(results)
        else:
            # Nothing to say, or nothing was there: what torch gives for the whole slice.
            results = [out.reshape(-1)[k] if out.numel() else out for out in outs]
        for i, result in enumerate(results):
            place = kept[result.reshape(-1)].reshape(result.shape) if i in indices and enough and len(at) else result
            pieces[i].append(place)
    mask = torch.tensor(known, dtype=torch.bool)
    slots = []
    for out, parts in zip(outs, pieces, strict=True):
        data = torch.stack([p.reshape(()) for p in parts]).reshape(out.shape).to(out.dtype) if parts else out
        slots.append(Slot(data, mask.reshape(out.shape)))
    return slots[0] if isinstance(plain, Tensor) else tuple(slots)


def _other_arguments(c: Call, *but: str) -> dict[str, Any]:
    return {name: value for name, value in c.bound.items() if name not in ("self", "dim", "keepdim", *but)}


@oracle(
    """sum prod mean var std var_mean std_mean amax amin aminmax any all nansum nanmean logsumexp special_logsumexp
    linalg_vector_norm norm frobenius_norm"""
)
def reduction(c: Call) -> Any:
    """The packet itself on each compressed slice, with every argument but `dim` and `keepdim`."""
    x = c["self"]
    others = {k: (v.data if isinstance(v, Slot) else v) for k, v in _other_arguments(c).items()}

    def one(values: Tensor) -> Any:
        changed = dict(others)
        if "dim" in c:
            many = c["dim"] is None or not isinstance(c["dim"], int)
            changed["dim"] = [0] if many else 0
            changed["keepdim"] = False
        if c.name == "aminmax":
            changed["dim"] = 0
        return c.run({**c.bound, **changed, "self": values}, lambda slot: slot.data)

    return reduce_by_slices(c, one, dims=c.dims(x.ndim))


@oracle("max", "min", "median", "nanmedian", "mode")
def with_index(c: Call) -> Any:
    """The value; with `dim` also the place, in the uncompressed dimension."""
    if "dim" not in c:
        return reduce_by_slices(c, lambda values: c.op(values))
    return reduce_by_slices(c, lambda values: tuple(c.op(values, 0)), dims=c.dims(c["self"].ndim), indices=(1,))


@oracle("kthvalue")
def kthvalue(c: Call) -> Any:
    """Valid where k elements are."""
    k = c["k"]
    return reduce_by_slices(
        c, lambda values: tuple(c.op(values, k, 0)), dims=c.dims(c["self"].ndim), indices=(1,), least=k
    )


@oracle("argmax", "argmin")
def arg(c: Call) -> Any:
    """The place of the extreme among the valid elements."""
    return reduce_by_slices(c, lambda values: c.op(values), dims=c.dims(c["self"].ndim), indices=(0,))


@oracle("quantile", "nanquantile", "quantile.scalar", "nanquantile.scalar")
def quantile(c: Call) -> Any:
    """One call for each compressed slice; several q's come first in the result."""
    x, q = c["self"], c["q"]
    wanted = q.data if isinstance(q, Slot) else torch.tensor(q, dtype=x.data.dtype)
    if isinstance(q, Slot) and not q.all_valid:
        raise NoOracle("quantile with an invalid q")
    plain = c.plainly()
    dims = c.dims(x.ndim)
    rows, known = [], []
    for at in lines(x.shape, dims):
        values, _ = compressed(x, at)
        known.append(bool(len(values)))
        rows.append(
            c.op._overloadpacket(values, wanted, interpolation=c["interpolation"])
            if len(values)
            else torch.zeros_like(wanted)
        )
    table = torch.stack(rows, -1) if rows else torch.zeros_like(plain)
    mask = torch.tensor(known, dtype=torch.bool)
    # Slices come in the order of the remaining dimensions, which keepdim leaves in place.
    return Slot(table.reshape(plain.shape), mask.expand(table.shape).reshape(plain.shape))


@oracle("count_nonzero")
def count_nonzero(c: Call) -> Tensor:
    """A plain count of what is valid and not zero."""
    x = c["self"]
    counts: Tensor = (
        aten.count_nonzero.dim_IntList(torch.where(x.mask, x.data, False), c.dims(x.ndim))
        if x.ndim
        else (x.mask & (x.data != 0)).to(torch.int64)
    )
    return counts


@oracle("trace")
def trace(c: Call) -> Slot:
    """The sum over the diagonal."""
    data, mask = c["self"].data.diagonal(), c["self"].mask.diagonal()
    out = c.plainly()
    kept = data[mask]
    return Slot(kept.sum(dtype=out.dtype), torch.tensor(bool(len(kept)) or not len(data)))


@oracle("sum_to_size")
def sum_to_size(c: Call) -> Slot:
    """A sum over the dimensions that broadcasting added."""
    x, size = c["self"], list(c["size"])
    out = c.plainly()
    lead = x.ndim - len(size)
    dims = [*range(lead), *(lead + d for d, s in enumerate(size) if s == 1 and x.shape[lead + d] != 1)]
    if not dims:
        return Slot(out, x.mask)
    pieces, known = [], []
    for at in lines(x.shape, dims):
        values, _ = compressed(x, at)
        pieces.append(values.sum())
        known.append(bool(len(values)) or not len(at))
    return Slot(torch.stack(pieces).reshape(out.shape), torch.tensor(known).reshape(out.shape))


# ------------------------------------------------------------------------------------------------ scans, softmax


def along_lines(c: Call, one: Callable[[Tensor], Any], dim: int, indices: Sequence[int] = ()) -> Any:
    """`one` on each compressed line, put back where the elements were; valid where the input is."""
    x = c["self"]
    if x.ndim == 0:
        plain = c.plainly()
        return Slot(plain, x.mask) if isinstance(plain, Tensor) else tuple(Slot(p, x.mask) for p in plain)
    plain = c.plainly()
    outs = [plain] if isinstance(plain, Tensor) else list(plain)
    where_to: list[Tensor] = []
    pieces: list[list[Tensor]] = [[] for _ in outs]
    for at in lines(x.shape, [dim % x.ndim]):
        values, kept = compressed(x, at)
        if not len(values):
            continue
        results = one(values)
        where_to.append(at[kept])
        for i, result in enumerate([results] if isinstance(results, Tensor) else results):
            pieces[i].append(kept[result] if i in indices else result)
    slots = tuple(
        Slot(scatter_back(out, where_to, [p.to(out.dtype) for p in parts]).to(out.dtype), x.mask)
        for out, parts in zip(outs, pieces, strict=True)
    )
    return slots[0] if isinstance(plain, Tensor) else slots


@oracle("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")
def scan(c: Call) -> Any:
    """The scan of the compressed line."""
    kwargs = {"dtype": c["dtype"]} if "dtype" in c else {}
    indices = (1,) if c.name in ("cummax", "cummin") else ()
    return along_lines(c, lambda values: c.op(values, 0, **kwargs), c["dim"], indices)


@oracle("softmax", "log_softmax", "_softmax", "_log_softmax", "_safe_softmax", "special_softmax", "special_log_softmax")
def softmax(c: Call) -> Any:
    """The softmax of the compressed line."""

    def one(values: Tensor) -> Any:
        return c.run({**c.bound, "self": values, "dim": 0}, lambda slot: slot.data)

    return along_lines(c, one, c["dim"])


# --------------------------------------------------------------------------------------------------------- sorting


def _front(
    c: Call, one: Callable[[Tensor], tuple[Tensor, ...]], dim: int, places: int | None, outputs: Sequence[int]
) -> Any:
    """Sorted valid elements first in each line: the first n places (of `places`) are valid, the tail is not.

    `outputs`: for each output 0 (values) or 1 (places in the uncompressed line).
    """
    x = c["self"]
    plain = c.plainly()
    outs = [plain] if isinstance(plain, Tensor) else list(plain)
    if x.ndim == 0:
        slots = tuple(Slot(out, x.mask.expand(out.shape)) for out in outs)
        return slots[0] if isinstance(plain, Tensor) else slots
    dim %= x.ndim
    datas = [torch.zeros(out.numel(), dtype=out.dtype) for out in outs]
    masks = torch.zeros(outs[0].numel(), dtype=torch.bool)
    for at, to in zip(lines(x.shape, [dim]), lines(outs[0].shape, [dim]), strict=True):
        values, kept = compressed(x, at)
        if not len(values):
            continue
        results = one(values)
        n = min(len(results[0]), len(to))
        masks[to[:n]] = True
        for i, output in enumerate(outputs):
            result = results[output][:n]
            datas[i] = datas[i].index_put((to[:n],), kept[result] if output == 1 else result)
    slots = tuple(Slot(d.reshape(o.shape), masks.reshape(o.shape)) for d, o in zip(datas, outs, strict=True))
    return slots[0] if isinstance(plain, Tensor) else slots


@oracle("sort", "argsort", "msort")
def sort(c: Call) -> Any:
    """Stable, so that the places of equal elements are those of the compressed line."""
    descending, dim = c.get("descending", False), c.get("dim", 0)
    outputs = {"sort": (0, 1), "argsort": (1,), "msort": (0,)}[c.name]
    return _front(c, lambda v: torch.sort(v, dim=0, descending=descending, stable=True), dim, None, outputs)


@oracle("topk")
def topk(c: Call) -> Any:
    """The largest (or smallest) k of the valid elements, in order."""
    k, largest = c["k"], c["largest"]
    return _front(c, lambda v: torch.topk(v, min(k, len(v)), 0, largest, True), c["dim"], k, (0, 1))


# -------------------------------------------------------------------------------------------------------- queries


@oracle("nonzero", "argwhere")
def nonzero(c: Call) -> Tensor:
    """Plain positions of the valid elements that are not zero."""
    x = c["self"]
    return torch.nonzero(x.mask & (x.data != 0))


@oracle("nonzero_numpy")
def nonzero_numpy(c: Call) -> list[Tensor]:
    """As nonzero, one tensor a dimension."""
    x = c["self"]
    return list(torch.nonzero(x.mask & (x.data != 0), as_tuple=True))


@oracle("nonzero_static")
def nonzero_static(c: Call) -> Tensor:
    """As nonzero, padded."""
    x = c["self"]
    return torch.nonzero_static(x.mask & (x.data != 0), size=c["size"], fill_value=c["fill_value"])


@oracle("unique_consecutive", "_unique2", "_unique")
def unique(c: Call) -> Any:
    """Plain answers about the valid elements; the inverse is masked like the input."""
    x = c["self"]
    if c.get("dim") is not None:
        raise NoOracle("unique with dim")
    changed = {"self": x.data.reshape(-1)[x.mask.reshape(-1)]}
    values, inverse, counts = c.run({**c.bound, **changed}, lambda slot: slot.data)
    if not c["return_inverse"]:
        return values, inverse, counts
    full = torch.zeros(x.shape, dtype=torch.int64)
    full[x.mask] = inverse.reshape(-1)
    return values, Slot(full, x.mask), counts


@oracle("bincount", "histc")
def histogram(c: Call) -> Tensor:
    """Plain counts of the valid elements."""
    x = c["self"]
    weights = c.get("weights")
    keep = x.mask if weights is None else x.mask & weights.mask
    changed: dict[str, Any] = {"self": x.data[keep]}
    if weights is not None:
        changed["weights"] = weights.data[keep]
    out: Tensor = c.run({**c.bound, **changed}, lambda slot: slot.data)
    return out


@oracle("equal")
def equal(c: Call) -> bool:
    """The same mask, and the same values where valid."""
    a, b = c["self"], c["other"]
    return a.shape == b.shape and torch.equal(a.mask, b.mask) and torch.equal(a.data[a.mask], b.data[b.mask])


@oracle("allclose")
def allclose(c: Call) -> bool:
    """The same mask, and close values where valid."""
    a, b = c["self"], c["other"]
    shape = torch.broadcast_shapes(a.shape, b.shape)
    mine, theirs = a.mask.expand(shape), b.mask.expand(shape)
    if not torch.equal(mine, theirs):
        return False
    return bool(
        c.run(
            {**c.bound, "self": a.data.expand(shape)[mine], "other": b.data.expand(shape)[mine]}, lambda slot: slot.data
        )
    )


@oracle("isin")
def isin(c: Call) -> Slot:
    """Elementwise in the elements, among the valid test elements."""
    elements, tests = c["elements"], c["test_elements"]
    found = [torch.isin(e, tests.data[tests.mask]) for e in elements.data.reshape(-1)]
    out = torch.stack(found).reshape(elements.shape) if found else c.plainly()
    return Slot(out ^ bool(c["invert"]), elements.mask)


@oracle("_local_scalar_dense")
def item(c: Call) -> Any:
    """The value; raises where it is invalid."""
    if not c["self"].all_valid:
        raise Refused("item() of something invalid")
    return c["self"].data.item()


@oracle("_assert_async", "_assert_tensor_metadata")
def asserted(c: Call) -> None:
    """Nothing comes back."""


@oracle("searchsorted", "bucketize")
def searchsorted(c: Call) -> Slot:
    """Elementwise on the values where the boundaries are all valid."""
    boundaries = c.get("sorted_sequence", c.get("boundaries"))
    values = c["self"]
    sorter = c.get("sorter")
    if not boundaries.all_valid or (sorter is not None and not sorter.all_valid):
        raise NoOracle("searchsorted with invalid boundaries")
    out = c.plainly()
    return Slot(out, values.mask.expand(out.shape) if isinstance(values, Slot) else all_true(out))


# ------------------------------------------------------------------------------------- pairs, differences, statistics


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
    if any(isinstance(c.get(w), Slot) for w in ("fweights", "aweights")):
        raise NoOracle("cov with weights")
    out = c.plainly()
    data = x.data.reshape(-1, x.shape[-1]) if x.ndim else x.data.reshape(1, 1)
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
                rows.append(c.run({**c.bound, "self": pair}, lambda slot: slot.data)[0, 1])
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
