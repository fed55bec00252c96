"""Reductions, scans, softmax and sorting: plain torch on each slice with its invalid elements removed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.oracles.slots import (
    Call,
    NoOracle,
    Slot,
    lines,
    oracle,
    scatter_back,
    valid,
)
from op_registry.conformance.trees import tree_map

aten = torch.ops.aten


def compressed(slot: Slot, at: Tensor) -> tuple[Tensor, Tensor]:
    """The valid elements of a slice, and their places in it."""
    kept = slot.mask.reshape(-1)[at].nonzero().reshape(-1)
    return slot.data.reshape(-1)[at][kept], kept


def reduce_by_slices(
    c: Call,
    one: Callable[[Tensor], Any],
    *,
    operand: str = "self",
    dims: Sequence[int] | None = None,
    indices: Sequence[int] = (),
    least: int = 1,
) -> Any:
    """`one` on each compressed slice: valid where `least` elements are, or where there were none to begin with.

    `indices` are the outputs that say where an element was: places in the uncompressed slice.
    """
    x = c[operand]
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
    """Valid where k elements are; torch names any of several that are equal."""
    k = c["k"]

    def kth(values: Tensor) -> tuple[Tensor, ...]:
        value, index = c.op(values, k, 0)
        if int((values == value).sum()) > 1:
            raise NoOracle("which of equal elements kthvalue names")
        return value, index

    return reduce_by_slices(c, kth, dims=c.dims(c["self"].ndim), indices=(1,), least=k)


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


def along_lines(
    c: Call, one: Callable[[Tensor], Any], dim: int, indices: Sequence[int] = (), operand: str = "self"
) -> Any:
    """`one` on each compressed line, put back where the elements were; valid where the input is."""
    x = c[operand]
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
    """Stable, so that the places of equal elements are those of the compressed line; as torch where all is valid."""
    if c["self"].all_valid:
        return as_torch_orders(c)
    descending, dim = c.get("descending", False), c.get("dim", 0)
    outputs = {"sort": (0, 1), "argsort": (1,), "msort": (0,)}[c.name]
    return _front(c, lambda v: torch.sort(v, dim=0, descending=descending, stable=True), dim, None, outputs)


def as_torch_orders(c: Call) -> Any:
    """torch names equal elements in any order."""
    return tree_map(lambda out: valid(out) if isinstance(out, Tensor) else out, c.plainly())


@oracle("topk")
def topk(c: Call) -> Any:
    """The largest (or smallest) k of the valid elements, in the stable order."""
    if c["self"].all_valid:
        return as_torch_orders(c)
    k, largest = c["k"], c["largest"]

    def first(v: Tensor) -> tuple[Tensor, ...]:
        values, index = torch.sort(v, dim=0, descending=largest, stable=True)
        return values[:k], index[:k]

    return _front(c, first, c["dim"], k, (0, 1))
