"""Contractions as what they are: every index tuple written out, products of valid factors added up.

``tuples("ik,kj->ij", a, b)`` lays each factor out over all letters, multiplies where all are valid, and sums. Nothing
is filled for a faster kernel; a result is valid where a tuple was, or where there were no tuples to begin with.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.oracles.slots import Call, NoOracle, Slot, broadcast_valid, oracle


def _spread(slot: Slot, letters: str, order: str, sizes: dict[str, int]) -> tuple[Tensor, Tensor]:
    """Data and mask with one dimension for each letter of `order`, a repeated letter being a diagonal."""
    data, mask = slot.data, slot.mask
    while len(set(letters)) < len(letters):
        repeated = next(x for x in letters if letters.count(x) > 1)
        first, second = (
            (i for i, x in enumerate(letters) if x == repeated)
            if letters.count(repeated) == 2
            else (
                letters.index(repeated),
                letters.index(repeated, letters.index(repeated) + 1),
            )
        )
        data, mask = data.diagonal(0, first, second), mask.diagonal(0, first, second)
        letters = "".join(x for i, x in enumerate(letters) if i not in (first, second)) + repeated
    places = [letters.index(x) for x in order if x in letters]
    shape = [sizes[x] if x in letters and data.shape[letters.index(x)] != 1 else 1 for x in order]
    return data.permute(places).reshape(shape), mask.permute(places).reshape(shape)


def tuples(equation: str, *slots: Slot, dtype: torch.dtype | None = None) -> Slot:
    """The contraction that an equation without ellipsis writes down."""
    left, out = equation.split("->")
    terms = left.split(",")
    sizes: dict[str, int] = {}
    for term, slot in zip(terms, slots, strict=True):
        for letter, size in zip(term, slot.shape, strict=True):
            sizes[letter] = max(sizes.get(letter, 1), size) if size and sizes.get(letter, 1) else 0
    order = out + "".join(sorted(set("".join(terms)) - set(out)))
    full = tuple(sizes[x] for x in order)
    product: Tensor | None = None
    both = torch.ones(full, dtype=torch.bool)
    for term, slot in zip(terms, slots, strict=True):
        data, mask = _spread(slot, term, order, sizes)
        product = data if product is None else product * data
        both = both & mask.expand(full)
    assert product is not None
    wide = product.expand(full)
    if wide.dtype in (torch.float16, torch.bfloat16):
        wide = wide.to(torch.float32)
    dims = tuple(range(len(out), len(order)))
    chosen = torch.where(both, wide, torch.zeros((), dtype=wide.dtype))
    if dims:
        count = 1
        for d in dims:
            count *= full[d]
        some = both.flatten(len(out)).any(-1) if both.numel() else torch.zeros(full[: len(out)], dtype=torch.bool)
        known = some if count else torch.ones_like(some)
        total = chosen.sum(dims) if wide.dtype is not torch.bool else chosen.flatten(len(out)).any(-1)
    else:
        known, total = both, chosen
    return Slot(total.to(dtype or product.dtype), known)


def _letters(n: int, skip: str = "") -> str:
    return "".join(x for x in string.ascii_letters if x not in skip)[:n]


def matmul_of(a: Slot, b: Slot, dtype: torch.dtype) -> Slot:
    """numpy's matmul: vectors lose their dimension, leading dimensions broadcast."""
    lead = max(a.ndim, b.ndim) - 2
    batch = _letters(max(lead, 0), "xyz")
    left = batch[len(batch) - (a.ndim - 2) :] + "xy" if a.ndim >= 2 else "y"
    right = batch[len(batch) - (b.ndim - 2) :] + "yz" if b.ndim >= 2 else "y"
    out = batch + ("x" if a.ndim >= 2 else "") + ("z" if b.ndim >= 2 else "")
    return tuples(f"{left},{right}->{out}", a, b, dtype=dtype)


@oracle("mm", "bmm", "mv", "dot", "matmul", "linalg_matmul")
def matmul(c: Call) -> Slot:
    """Sum over the shared dimension."""
    first = c["self"]
    second = next(c[name] for name in ("mat2", "vec", "tensor", "other") if name in c)
    return matmul_of(first, second, c.plainly().dtype)


@oracle("vdot")
def vdot(c: Call) -> Slot:
    """dot with the first conjugated."""
    x = c["self"]
    return matmul_of(Slot(x.data.conj().resolve_conj(), x.mask), c["other"], x.data.dtype)


@oracle("linalg_vecdot")
def vecdot(c: Call) -> Slot:
    """Sum over one dimension, the first conjugated."""
    x, y, dim = c["x"], c["y"], c["dim"]
    out = c.plainly()
    data = x.data.conj() * y.data
    mask = broadcast_valid(data.shape, [x, y])
    some = mask.any(dim) if data.shape[dim] else torch.ones(out.shape, dtype=torch.bool)
    return Slot(torch.where(mask, data, torch.zeros((), dtype=data.dtype)).sum(dim).to(out.dtype), some)


def added(c: Call, product: Slot, addend: Slot | None, beta: Any = 1, alpha: Any = 1) -> Slot:
    """beta · addend + alpha · product, elementwise; with beta = 0 the addend and its mask take no part."""
    data, mask = product.data, product.mask
    takes_part = beta != 0
    if not (data.is_floating_point() or data.is_complex()):
        beta, alpha = int(beta), int(alpha)  # as torch's kernels do
    if alpha != 1:
        data = data * alpha
    if addend is not None and takes_part:
        data = data + (addend.data * beta if beta != 1 else addend.data)
        mask = broadcast_valid(data.shape, [Slot(data, mask), addend])
    return Slot(data.to(c.plainly().dtype), mask)


@oracle("addmm", "baddbmm", "addmv", "addbmm", "addr")
def addmm(c: Call) -> Slot:
    """A contraction added to `self`."""
    names = {
        "addmm": ("mat1", "mat2", "ik,kj->ij"),
        "baddbmm": ("batch1", "batch2", "bik,bkj->bij"),
        "addbmm": ("batch1", "batch2", "bik,bkj->ij"),
        "addmv": ("mat", "vec", "ik,k->i"),
        "addr": ("vec1", "vec2", "i,j->ij"),
    }[c.name]
    return added(c, tuples(names[2], c[names[0]], c[names[1]]), c["self"], c["beta"], c["alpha"])


@oracle("linear")
def linear(c: Call) -> Slot:
    """Sum over features, bias added elementwise."""
    x, weight = c["input"], c["weight"]
    batch = _letters(x.ndim - 1, "kj")
    wide = "jk" if weight.ndim == 2 else "k"
    out = batch + ("j" if weight.ndim == 2 else "")
    return added(c, tuples(f"{batch}k,{wide}->{out}", x, weight), c["bias"])


@oracle("outer", "ger")
def outer(c: Call) -> Slot:
    """Every pair."""
    return tuples("i,j->ij", c["self"], c.get("vec2"), dtype=c.plainly().dtype)


@oracle("inner")
def inner(c: Call) -> Slot:
    """Sum over the last dimension of both."""
    a, b = c["self"], c["other"]
    out = c.plainly()
    if not a.ndim or not b.ndim:
        return Slot(out, broadcast_valid(out.shape, [a, b]))
    left = _letters(a.ndim - 1, "z")
    right = _letters(b.ndim - 1, "z" + left)
    return tuples(f"{left}z,{right}z->{left}{right}", a, b, dtype=out.dtype)


@oracle("tensordot")
def tensordot(c: Call) -> Slot:
    """Sum over the paired dimensions."""
    a, b = c["self"], c["other"]
    left, right = list(_letters(a.ndim)), list(string.ascii_uppercase[: b.ndim])
    for d, e in zip(c["dims_self"], c["dims_other"], strict=True):
        right[e] = left[d]
    shared = {left[d] for d in c["dims_self"]}
    out = "".join(x for x in left if x not in shared) + "".join(x for x in right if x not in shared)
    return tuples(f"{''.join(left)},{''.join(right)}->{out}", a, b, dtype=c.plainly().dtype)


@oracle("einsum")
def einsum(c: Call) -> Slot:
    """As written, ellipses spelled out."""
    slots: Sequence[Slot] = c["tensors"]
    equation = c["equation"].replace(" ", "")
    left, arrow, out = equation.partition("->")
    terms = left.split(",")
    free = "".join(x for x in string.ascii_letters if x not in equation)
    width = max(
        (s.ndim - len(t.replace("...", "")) for s, t in zip(slots, terms, strict=True) if "..." in t), default=0
    )
    dots = free[:width]
    spelled = []
    for slot, term in zip(slots, terms, strict=True):
        mine = slot.ndim - len(term.replace("...", "")) if "..." in term else 0
        spelled.append(term.replace("...", dots[len(dots) - mine :]))
    if not arrow:
        every = "".join(terms).replace("...", "")
        out = dots + "".join(sorted(x for x in set(every) if every.count(x) == 1))
    else:
        out = out.replace("...", dots)
        if "..." not in equation.partition("->")[2] and dots:
            raise NoOracle("einsum that sums over its ellipsis")
    return tuples(f"{','.join(spelled)}->{out}", *slots, dtype=c.plainly().dtype)


@oracle("bilinear")
def bilinear(c: Call) -> Slot:
    """Sum over pairs of features."""
    batch = _letters(c["input1"].ndim - 1, "ijk")
    return added(c, tuples(f"{batch}i,kij,{batch}j->{batch}k", c["input1"], c["weight"], c["input2"]), c["bias"])


@oracle("kron")
def kron(c: Call) -> Slot:
    """Every pair of elements, in blocks."""
    a, b = c["self"], c["other"]
    n = max(a.ndim, b.ndim)
    out = c.plainly()
    left = a.mask.reshape([1] * (n - a.ndim) + list(a.shape))
    right = b.mask.reshape([1] * (n - b.ndim) + list(b.shape))
    for d in range(n):
        left, right = left.unsqueeze(2 * d + 1), right.unsqueeze(2 * d)
    return Slot(out, (left & right).reshape(out.shape))


# ------------------------------------------------------------------------------------------------- convolutions


def _pair(value: Any, n: int) -> list[int]:
    return (
        [int(value)] * n
        if isinstance(value, int)
        else [int(v) for v in (value if len(value) == n else list(value) * n)]
    )


def _windows(
    x: Slot, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[tuple[int, int]], dilation: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """(N, C, *out, taps): data, validity, and whether a tap lies inside the input at all (padding is no element)."""
    n = len(kernel)
    spread = [p for pair in reversed(list(padding)) for p in pair]
    data = torch.nn.functional.pad(x.data, spread)
    mask = torch.nn.functional.pad(x.mask, spread)
    inside = torch.nn.functional.pad(torch.ones(x.shape, dtype=torch.bool), spread)
    taps = []
    sizes = [(data.shape[2 + d] - dilation[d] * (kernel[d] - 1) - 1) // stride[d] + 1 for d in range(n)]
    for offset in torch.ones(tuple(kernel)).nonzero().tolist():
        at: list[Any] = [slice(None), slice(None)]
        for d in range(n):
            start = offset[d] * dilation[d]
            at.append(slice(start, start + stride[d] * (sizes[d] - 1) + 1, stride[d]))
        taps.append(tuple(at))
    return tuple(torch.stack([t[at] for at in taps], -1) for t in (data, mask, inside))  # type: ignore[return-value]


def _convolve(
    x: Slot, weight: Slot, stride: Any, padding: Sequence[tuple[int, int]], dilation: Any, groups: int
) -> Slot:
    data, mask, inside = _windows(x, weight.shape[2:], stride, padding, dilation)
    out_channels = weight.shape[0]
    each_in, each_out = x.shape[1] // groups, out_channels // groups
    results, known = [], []
    w, wm = weight.data.flatten(2), weight.mask.flatten(2)
    ones = [1] * (data.ndim - 3)
    for o in range(out_channels):
        group = slice((o // each_out) * each_in, (o // each_out + 1) * each_in)
        factor = w[o].reshape(1, each_in, *ones, -1)
        both = mask[:, group] & wm[o].reshape(1, each_in, *ones, -1)
        product = torch.where(both, data[:, group] * factor, torch.zeros((), dtype=data.dtype))
        results.append(product.sum((1, -1)))
        known.append(both.flatten(2 + len(ones)).any(-1).any(1) | ~inside[:, group].any(-1).any(1))
    return Slot(torch.stack(results, 1), torch.stack(known, 1))


def _same_padding(weight: Slot, dilation: Sequence[int]) -> list[tuple[int, int]]:
    total = [d * (k - 1) for k, d in zip(weight.shape[2:], dilation, strict=True)]
    return [(t // 2, t - t // 2) for t in total]


@oracle("conv1d", "conv2d", "conv3d")
def conv(c: Call) -> Slot:
    """The sum over taps whose input and weight are both valid; padding is no element."""
    x, weight = c["input"], c["weight"]
    n = weight.ndim - 2
    stride, dilation = _pair(c["stride"], n), _pair(c["dilation"], n)
    padding = (
        _same_padding(weight, dilation)
        if c["padding"] == "same"
        else [(0, 0)] * n
        if c["padding"] == "valid"
        else [(p, p) for p in _pair(c["padding"], n)]
    )
    batched = x.ndim == n + 2
    whole = x if batched else Slot(x.data.unsqueeze(0), x.mask.unsqueeze(0))
    if not whole.data.numel():
        raise NoOracle("convolution of nothing")
    out = _convolve(whole, weight, stride, padding, dilation, c["groups"])
    return _with_bias(c, out if batched else Slot(out.data[0], out.mask[0]), batched)


def _with_bias(c: Call, out: Slot, batched: bool) -> Slot:
    bias = c["bias"]
    if bias is None:
        return Slot(out.data.to(c.plainly().dtype), out.mask)
    channel = [-1] + [1] * (out.ndim - (2 if batched else 1))
    return added(c, out, Slot(bias.data.reshape(channel), bias.mask.reshape(channel)))


@oracle("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def conv_transpose(c: Call) -> Slot:
    """A convolution of the input, spread out by the stride, with the flipped weight; the holes are no elements."""
    x, weight = c["input"], c["weight"]
    n, groups = weight.ndim - 2, c["groups"]
    stride, dilation = _pair(c["stride"], n), _pair(c["dilation"], n)
    padding, extra = _pair(c["padding"], n), _pair(c["output_padding"], n)
    batched = x.ndim == n + 2
    whole = x if batched else Slot(x.data.unsqueeze(0), x.mask.unsqueeze(0))
    sizes = [(s - 1) * stride[d] + 1 for d, s in enumerate(whole.shape[2:])]
    at = (slice(None), slice(None), *(slice(None, None, stride[d]) for d in range(n)))
    data = torch.zeros(*whole.shape[:2], *sizes, dtype=x.data.dtype)
    data[at] = whole.data
    known = torch.zeros(data.shape, dtype=torch.bool)
    known[at] = whole.mask
    there = torch.zeros(data.shape, dtype=torch.bool)
    there[at] = True
    each_in, each_out = weight.shape[0] // groups, weight.shape[1]

    def turned(t: Tensor) -> Tensor:
        split = t.reshape(groups, each_in, each_out, *t.shape[2:]).transpose(1, 2)
        return split.reshape(groups * each_out, each_in, *t.shape[2:]).flip(list(range(2, t.ndim)))

    flipped = Slot(turned(weight.data), turned(weight.mask))
    reach = [dilation[d] * (weight.shape[2 + d] - 1) - padding[d] for d in range(n)]
    pads = [(reach[d], reach[d] + extra[d]) for d in range(n)]
    crop = [max(0, -low) for low, _ in pads]
    ends = [max(0, -high) for _, high in pads]
    pads = [(max(0, low), max(0, high)) for low, high in pads]
    sliced = (slice(None), slice(None), *(slice(crop[d], sizes[d] - ends[d]) for d in range(n)))
    one = [1] * n
    out = _convolve(Slot(data[sliced], known[sliced]), flipped, one, pads, dilation, groups)
    # A result is torch's own where no element could reach it at all: the same sum over everything that is there.
    everything = Slot(torch.ones(flipped.shape), torch.ones(flipped.shape, dtype=torch.bool))
    reachable = _reached(there[sliced], everything, pads, dilation, groups)
    out = Slot(out.data, torch.where(reachable, out.mask, True))
    return _with_bias(c, out if batched else Slot(out.data[0], out.mask[0]), batched)


def _reached(there: Tensor, weight: Slot, pads: Sequence[tuple[int, int]], dilation: Any, groups: int) -> Tensor:
    counted = Slot(there.to(torch.float32), torch.ones(there.shape, dtype=torch.bool))
    return _convolve(counted, weight, [1] * len(pads), pads, dilation, groups).data > 0.5
