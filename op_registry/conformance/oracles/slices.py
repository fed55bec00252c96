"""Reductions, scans, softmax and sorting: plain torch on each slice with its invalid elements removed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.oracles.call import Call, Expected, NoOracle, all_outputs_valid, oracle
from op_registry.conformance.oracles.engine import (
    Group,
    Results,
    groups,
    map_groups,
    reduce_groups,
    scatter_back,
    slices,
)

# Plain torch's result for the valid elements of one slice.
OfSlice = Callable[[Tensor], Results]


def on_values(one: OfSlice, indices: Sequence[int]) -> Callable[[Group], Results]:
    """`one` on a group's values. The outputs in `indices` are indices, which are mapped to the whole group."""

    def of_group(group: Group) -> Results:
        results = one(group.values[0])
        if not indices:
            return results
        outs = [results] if isinstance(results, Tensor) else results
        mapped = [in_whole_group(group, out) if n in indices else out for n, out in enumerate(outs)]
        return mapped[0] if isinstance(results, Tensor) else mapped

    return of_group


def in_whole_group(group: Group, index: Tensor) -> Tensor:
    """Indices among the valid elements as indices in the group; one that names none names none there."""
    kept, none = len(group.kept), torch.where(index < 0, index, index + (group.size - len(group.kept)))
    return torch.where((index >= 0) & (index < kept), group.kept[index.clamp(0, kept - 1)], none)


def reduce_slices(
    c: Call,
    one: OfSlice,
    *,
    operand: str = "self",
    dims: Sequence[int] | None = None,
    indices: Sequence[int] = (),
    least: int = 1,
) -> Any:
    """`one` on the valid elements of each slice; see :func:`reduce_groups` for `least`.

    `indices` are the outputs that are indices into the slice.
    """
    x = c[operand]
    over = range(x.ndim) if dims is None else dims
    return reduce_groups(groups([x], slices(x.shape, over)), on_values(one, indices), c.plain(), least)


@oracle(
    """sum prod mean var std var_mean std_mean amax amin aminmax any all nansum nanmean logsumexp special_logsumexp
    linalg_vector_norm norm frobenius_norm"""
)
def reduction(c: Call) -> Any:
    """The operator itself on each slice, with all other arguments unchanged."""
    changes: dict[str, object] = {}
    if "dim" in c:
        changes = {"dim": 0 if isinstance(c["dim"], int) or c.name == "aminmax" else [0], "keepdim": False}
    return reduce_slices(c, lambda values: c.plain(**changes, self=values), dims=c.dims(c["self"].ndim))


@oracle("max", "min", "median", "nanmedian", "mode")
def with_index(c: Call) -> Any:
    """The value; with `dim` also its index in the whole slice."""
    if "dim" not in c:
        return reduce_slices(c, lambda values: c.op(values))
    return reduce_slices(c, lambda values: tuple(c.op(values, 0)), dims=c.dims(c["self"].ndim), indices=(1,))


@oracle("kthvalue")
def kthvalue(c: Call) -> Any:
    """Valid where at least k elements are. Among equal elements, torch may return any index."""
    k = c["k"]

    def kth(values: Tensor) -> tuple[Tensor, ...]:
        value, index = c.op(values, k, 0)
        if int((values == value).sum()) > 1:
            raise NoOracle("which of equal elements kthvalue names")
        return value, index

    return reduce_slices(c, kth, dims=c.dims(c["self"].ndim), indices=(1,), least=k)


@oracle("argmax", "argmin")
def arg(c: Call) -> Any:
    """The index of the extreme among the valid elements."""
    return reduce_slices(c, lambda values: c.op(values), dims=c.dims(c["self"].ndim), indices=(0,))


@oracle("quantile", "nanquantile", "quantile.scalar", "nanquantile.scalar")
def quantile(c: Call) -> Any:
    """One call for each slice; several q's are the first dimension of the result."""
    x, q = c["self"], c["q"]
    wanted = q.data if isinstance(q, Expected) else torch.tensor(q, dtype=x.data.dtype)
    if isinstance(q, Expected) and not q.all_valid:
        raise NoOracle("quantile with an invalid q")

    def one(values: Tensor) -> Tensor:
        return c.op._overloadpacket(values, wanted, interpolation=c["interpolation"])

    return reduce_slices(c, one, dims=c.dims(x.ndim))


@oracle("trace")
def trace(c: Call) -> Any:
    """The sum over the diagonal."""
    diagonal, out = c["self"].map(Tensor.diagonal), c.plain()
    whole = slices(diagonal.shape, [0])
    return reduce_groups(groups([diagonal], whole), lambda group: group.values[0].sum(dtype=out.dtype), out)


@oracle("sum_to_size")
def sum_to_size(c: Call) -> Any:
    """A sum over the dimensions that broadcasting added."""
    x, size = c["self"], list(c["size"])
    lead = x.ndim - len(size)
    dims = [*range(lead), *(lead + d for d, s in enumerate(size) if s == 1 and x.shape[lead + d] != 1)]
    return reduce_slices(c, lambda values: values.sum(), dims=dims) if dims else Expected(c.plain(), x.mask)


# ------------------------------------------------------------------------------------------------ scans, softmax


def map_slices(c: Call, one: OfSlice, dim: int, indices: Sequence[int] = (), operand: str = "self") -> Any:
    """`one` on the valid elements along `dim`, whose results replace them; valid where the input is."""
    x, plain = c[operand], c.plain()
    if x.ndim == 0:
        return Expected(plain, x.mask) if isinstance(plain, Tensor) else tuple(Expected(p, x.mask) for p in plain)
    return map_groups(groups([x], slices(x.shape, [dim % x.ndim])), on_values(one, indices), plain, x.mask)


@oracle("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")
def scan(c: Call) -> Any:
    """The scan of the valid elements."""
    kwargs = {"dtype": c["dtype"]} if "dtype" in c else {}
    indices = (1,) if c.name in ("cummax", "cummin") else ()
    return map_slices(c, lambda values: c.op(values, 0, **kwargs), c["dim"], indices)


@oracle("vander")
def vander(c: Call) -> Expected:
    """The powers of each element alone. Power 0, in the first column or the last, reads nothing."""
    x, columns = c["x"], c["x"].data.numel() if c.get("N") is None else c["N"]
    powers = range(columns) if c.get("increasing") else range(columns - 1, -1, -1)
    wide = torch.promote_types(x.data.dtype, torch.int64)
    rows = [[v**power if power else torch.ones_like(v) for power in powers] for v in x.data.to(wide)]
    data = torch.stack([v for row in rows for v in row]) if columns and rows else torch.empty(0, dtype=wide)
    mask = [[power == 0 or known for power in powers] for known in x.mask.tolist()]
    return Expected(data.reshape(len(rows), columns), torch.tensor(mask, dtype=torch.bool).reshape(len(rows), columns))


@oracle("softmax", "log_softmax", "_softmax", "_log_softmax", "_safe_softmax", "special_softmax", "special_log_softmax")
def softmax(c: Call) -> Any:
    """The softmax of the valid elements."""
    return map_slices(c, lambda values: c.plain(self=values, dim=0), c["dim"])


# --------------------------------------------------------------------------------------------------------- sorting


def sort_slices(c: Call, one: Callable[[Tensor], tuple[Tensor, ...]], dim: int, outputs: Sequence[int]) -> Any:
    """`one` sorts the valid elements of a slice: (values, indices). They come first, and the tail is invalid.

    outputs  for each output of the operator, 0 (values) or 1 (indices into the whole slice)
    """
    x, plain = c["self"], c.plain()
    outs = [plain] if isinstance(plain, Tensor) else list(plain)
    if x.ndim == 0:
        expected = [Expected(out, x.mask.expand(out.shape)) for out in outs]
        return expected[0] if isinstance(plain, Tensor) else tuple(expected)
    dim %= x.ndim
    mask = torch.zeros(outs[0].numel(), dtype=torch.bool)
    written: list[Tensor] = []
    pieces: list[list[Tensor]] = [[] for _ in outs]
    for group, target in zip(groups([x], slices(x.shape, [dim])), slices(outs[0].shape, [dim]), strict=True):
        if not len(group.kept):
            continue
        values, index = one(group.values[0])
        count = min(len(values), len(target))
        written.append(target[:count])
        mask[target[:count]] = True
        for parts, output in zip(pieces, outputs, strict=True):
            parts.append(group.kept[index[:count]] if output == 1 else values[:count])
    mask = mask.reshape(outs[0].shape)
    expected = [
        Expected(scatter_back(out.shape, written, parts, out.dtype), mask)
        for out, parts in zip(outs, pieces, strict=True)
    ]
    return expected[0] if isinstance(plain, Tensor) else tuple(expected)


@oracle("sort", "argsort", "msort")
def sort(c: Call) -> Any:
    """A stable sort, so that equal elements keep their order; if all are valid, torch's own order."""
    if c["self"].all_valid:
        return all_outputs_valid(c.plain())
    descending, dim = c.get("descending", False), c.get("dim", 0)
    outputs = {"sort": (0, 1), "argsort": (1,), "msort": (0,)}[c.name]
    return sort_slices(c, lambda v: torch.sort(v, dim=0, descending=descending, stable=True), dim, outputs)


@oracle("topk")
def topk(c: Call) -> Any:
    """The largest (or smallest) k of the valid elements, in the stable order."""
    if c["self"].all_valid:
        return all_outputs_valid(c.plain())
    k, largest = c["k"], c["largest"]

    def first(v: Tensor) -> tuple[Tensor, ...]:
        values, index = torch.sort(v, dim=0, descending=largest, stable=True)
        return values[:k], index[:k]

    return sort_slices(c, first, c["dim"], (0, 1))
