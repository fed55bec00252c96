"""Contractions written out: a sum over all index tuples whose factors are all valid.

``tuples("ik,kj->ij", a, b)`` broadcasts each factor over all letters, multiplies where all are valid, and sums, without
any faster kernel. A result is valid if one of its tuples is valid, or if it has no tuples.
"""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.oracles.call import Call, Expected, NoOracle, Refused, broadcast_valid, oracle, valid


def _over_letters(x: Expected, letters: str, order: str, sizes: dict[str, int]) -> tuple[Tensor, Tensor]:
    """Data and mask with one dimension for each letter of `order`; a repeated letter takes the diagonal."""
    data, mask = x.data, x.mask
    while len(set(letters)) < len(letters):
        repeated = next(letter for letter in letters if letters.count(letter) > 1)
        first = letters.index(repeated)
        second = letters.index(repeated, first + 1)
        data, mask = data.diagonal(0, first, second), mask.diagonal(0, first, second)
        letters = "".join(letter for i, letter in enumerate(letters) if i not in (first, second)) + repeated
    permutation = [letters.index(letter) for letter in order if letter in letters]
    shape = [sizes[letter] if letter in letters and data.shape[letters.index(letter)] != 1 else 1 for letter in order]
    return data.permute(permutation).reshape(shape), mask.permute(permutation).reshape(shape)


def tuples(equation: str, *factors: Expected, dtype: torch.dtype | None = None) -> Expected:
    """The contraction that an einsum equation without ellipsis describes."""
    left, out = equation.split("->")
    terms = left.split(",")
    sizes: dict[str, int] = {}
    for term, factor in zip(terms, factors, strict=True):
        for letter, size in zip(term, factor.shape, strict=True):
            sizes[letter] = max(sizes.get(letter, 1), size) if size and sizes.get(letter, 1) else 0
    order = out + "".join(sorted(set("".join(terms)) - set(out)))
    full = tuple(sizes[x] for x in order)
    product: Tensor | None = None
    both = torch.ones(full, dtype=torch.bool)
    for term, factor in zip(terms, factors, strict=True):
        data, mask = _over_letters(factor, term, order, sizes)
        product = data if product is None else product * data
        both = both & mask.expand(full)
    assert product is not None
    wide = product.expand(full)
    if wide.dtype in (torch.float16, torch.bfloat16):
        wide = wide.to(torch.float32)
    dims = tuple(range(len(out), len(order)))
    chosen = torch.where(both, wide, torch.zeros((), dtype=wide.dtype))
    if dims:
        has_tuples = all(full[d] for d in dims)
        shape = full[: len(out)]
        known = both.flatten(len(out)).any(-1) if both.numel() else torch.full(shape, not has_tuples)
        total = chosen.sum(dims) if wide.dtype is not torch.bool else chosen.flatten(len(out)).any(-1)
    else:
        known, total = both, chosen
    return Expected(total.to(dtype or product.dtype), known)


def _letters(n: int, skip: str = "") -> str:
    return "".join(x for x in string.ascii_letters if x not in skip)[:n]


def matmul_of(a: Expected, b: Expected, dtype: torch.dtype) -> Expected:
    """numpy's matmul: vectors lose their dimension, leading dimensions broadcast."""
    lead = max(a.ndim, b.ndim) - 2
    batch = _letters(max(lead, 0), "xyz")
    left = batch[len(batch) - (a.ndim - 2) :] + "xy" if a.ndim >= 2 else "y"
    right = batch[len(batch) - (b.ndim - 2) :] + "yz" if b.ndim >= 2 else "y"
    out = batch + ("x" if a.ndim >= 2 else "") + ("z" if b.ndim >= 2 else "")
    return tuples(f"{left},{right}->{out}", a, b, dtype=dtype)


@oracle("mm", "bmm", "mv", "dot", "matmul", "linalg_matmul")
def matmul(c: Call) -> Expected:
    """Sum over the shared dimension."""
    first = c["self"]
    second = next(c[name] for name in ("mat2", "vec", "tensor", "other") if name in c)
    return matmul_of(first, second, c.plain().dtype)


@oracle("_sparse_mm_reduce_impl")
def sparse_product(c: Call) -> Any:
    """torch.sparse.mm(x, y, reduce) of a plain torch.sparse `x`, which is 0 where it specifies nothing."""
    if c["reduce"] != "sum":
        raise Refused(f"torch.sparse.mm(..., {c['reduce']!r})")
    x, (plain, places) = c["self"].data.to_dense(), c.plain()
    return matmul_of(Expected(x, torch.ones_like(x, dtype=torch.bool)), c["other"], plain.dtype), valid(places)


@oracle("vdot")
def vdot(c: Call) -> Expected:
    """dot, with the first vector conjugated."""
    x = c["self"]
    return matmul_of(Expected(x.data.conj().resolve_conj(), x.mask), c["other"], x.data.dtype)


@oracle("linalg_vecdot")
def vecdot(c: Call) -> Expected:
    """Sum over one dimension, with the first operand conjugated."""
    x, y, dim = c["x"], c["y"], c["dim"]
    out = c.plain()
    data = x.data.conj() * y.data
    mask = broadcast_valid(data.shape, [x, y])
    known = mask.any(dim) if data.shape[dim] else torch.ones(out.shape, dtype=torch.bool)
    return Expected(torch.where(mask, data, torch.zeros((), dtype=data.dtype)).sum(dim).to(out.dtype), known)


def added(c: Call, product: Expected, addend: Expected | None, beta: float = 1, alpha: float = 1) -> Expected:
    """beta · addend + alpha · product, elementwise; with beta = 0 the addend and its mask are ignored."""
    data, mask = product.data, product.mask
    addend = addend if beta != 0 else None
    if not (data.is_floating_point() or data.is_complex()):
        beta, alpha = int(beta), int(alpha)  # as torch's kernels do
    if alpha != 1:
        data = data * alpha
    if addend is not None:
        data = data + (addend.data * beta if beta != 1 else addend.data)
        mask = broadcast_valid(data.shape, [Expected(data, mask), addend])
    return Expected(data.to(c.plain().dtype), mask)


@oracle("addmm", "baddbmm", "addmv", "addbmm", "addr")
def addmm(c: Call) -> Expected:
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
def linear(c: Call) -> Expected:
    """Sum over features, bias added elementwise."""
    x, weight = c["input"], c["weight"]
    batch = _letters(x.ndim - 1, "kj")
    wide = "jk" if weight.ndim == 2 else "k"
    out = batch + ("j" if weight.ndim == 2 else "")
    return added(c, tuples(f"{batch}k,{wide}->{out}", x, weight), c["bias"])


@oracle("outer", "ger")
def outer(c: Call) -> Expected:
    """Every pair."""
    return tuples("i,j->ij", c["self"], c.get("vec2"), dtype=c.plain().dtype)


@oracle("inner")
def inner(c: Call) -> Expected:
    """Sum over the last dimension of both."""
    a, b = c["self"], c["other"]
    out = c.plain()
    if not a.ndim or not b.ndim:
        return Expected(out, broadcast_valid(out.shape, [a, b]))
    left = _letters(a.ndim - 1, "z")
    right = _letters(b.ndim - 1, "z" + left)
    return tuples(f"{left}z,{right}z->{left}{right}", a, b, dtype=out.dtype)


@oracle("tensordot")
def tensordot(c: Call) -> Expected:
    """Sum over the paired dimensions."""
    a, b = c["self"], c["other"]
    left, right = list(_letters(a.ndim)), list(string.ascii_uppercase[: b.ndim])
    for d, e in zip(c["dims_self"], c["dims_other"], strict=True):
        right[e] = left[d]
    shared = {left[d] for d in c["dims_self"]}
    out = "".join(x for x in left if x not in shared) + "".join(x for x in right if x not in shared)
    return tuples(f"{''.join(left)},{''.join(right)}->{out}", a, b, dtype=c.plain().dtype)


@oracle("einsum")
def einsum(c: Call) -> Expected:
    """The equation, with its ellipses replaced by letters."""
    factors: Sequence[Expected] = c["tensors"]
    equation = c["equation"].replace(" ", "")
    left, arrow, out = equation.partition("->")
    terms = left.split(",")
    free = "".join(x for x in string.ascii_letters if x not in equation)
    width = max(
        (x.ndim - len(t.replace("...", "")) for x, t in zip(factors, terms, strict=True) if "..." in t), default=0
    )
    dots = free[:width]
    spelled = []
    for factor, term in zip(factors, terms, strict=True):
        own = factor.ndim - len(term.replace("...", "")) if "..." in term else 0
        spelled.append(term.replace("...", dots[len(dots) - own :]))
    if not arrow:
        named = "".join(terms).replace("...", "")
        out = dots + "".join(sorted(x for x in set(named) if named.count(x) == 1))
    else:
        out = out.replace("...", dots)
        if "..." not in equation.partition("->")[2] and dots:
            raise NoOracle("einsum that sums over its ellipsis")
    return tuples(f"{','.join(spelled)}->{out}", *factors, dtype=c.plain().dtype)


@oracle("bilinear")
def bilinear(c: Call) -> Expected:
    """Sum over pairs of features."""
    batch = _letters(c["input1"].ndim - 1, "ijk")
    return added(c, tuples(f"{batch}i,kij,{batch}j->{batch}k", c["input1"], c["weight"], c["input2"]), c["bias"])


@oracle("kron")
def kron(c: Call) -> Expected:
    """Every pair of elements, in blocks."""
    a, b = c["self"], c["other"]
    n = max(a.ndim, b.ndim)
    out = c.plain()
    left = a.mask.reshape([1] * (n - a.ndim) + list(a.shape))
    right = b.mask.reshape([1] * (n - b.ndim) + list(b.shape))
    for d in range(n):
        left, right = left.unsqueeze(2 * d + 1), right.unsqueeze(2 * d)
    return Expected(out, (left & right).reshape(out.shape))


# ------------------------------------------------------------------------------------------------- convolutions


def per_dimension(value: int | Sequence[int], n: int) -> list[int]:
    """An argument that is one number, or one for each of n dimensions, as a list of n numbers."""
    return (
        [int(value)] * n
        if isinstance(value, int)
        else [int(v) for v in (value if len(value) == n else list(value) * n)]
    )


def _windows(
    x: Expected,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """(N, C, *out, taps): data, mask, and whether a tap lies inside the input, not in its padding."""
    n = len(kernel)
    pads = [p for pair in reversed(list(padding)) for p in pair]
    data = torch.nn.functional.pad(x.data, pads)
    mask = torch.nn.functional.pad(x.mask, pads)
    inside = torch.nn.functional.pad(torch.ones(x.shape, dtype=torch.bool), pads)
    taps = []
    sizes = [(data.shape[2 + d] - dilation[d] * (kernel[d] - 1) - 1) // stride[d] + 1 for d in range(n)]
    for offset in torch.ones(tuple(kernel)).nonzero().tolist():
        tap = [slice(None), slice(None)]
        for d in range(n):
            start = offset[d] * dilation[d]
            tap.append(slice(start, start + stride[d] * (sizes[d] - 1) + 1, stride[d]))
        taps.append(tuple(tap))
    data, mask, inside = (torch.stack([t[tap] for tap in taps], -1) for t in (data, mask, inside))
    return data, mask, inside


def _convolve(
    x: Expected,
    weight: Expected,
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    groups: int,
) -> Expected:
    data, mask, inside = _windows(x, weight.shape[2:], stride, padding, dilation)
    out_channels = weight.shape[0]
    group_in, group_out = x.shape[1] // groups, out_channels // groups
    results, known = [], []
    kernel = weight.map(lambda t: t.flatten(2))
    ones = [1] * (data.ndim - 3)
    for o in range(out_channels):
        group = slice((o // group_out) * group_in, (o // group_out + 1) * group_in)
        factor = kernel.data[o].reshape(1, group_in, *ones, -1)
        both = mask[:, group] & kernel.mask[o].reshape(1, group_in, *ones, -1)
        product = torch.where(both, data[:, group] * factor, torch.zeros((), dtype=data.dtype))
        results.append(product.sum((1, -1)))
        known.append(both.flatten(2 + len(ones)).any(-1).any(1) | ~inside[:, group].any(-1).any(1))
    return Expected(torch.stack(results, 1), torch.stack(known, 1))


def _same_padding(weight: Expected, dilation: Sequence[int]) -> list[tuple[int, int]]:
    total = [d * (k - 1) for k, d in zip(weight.shape[2:], dilation, strict=True)]
    return [(t // 2, t - t // 2) for t in total]


@oracle("conv1d", "conv2d", "conv3d")
def conv(c: Call) -> Expected:
    """The sum over taps whose input and weight are both valid; padding does not count."""
    x, weight = c["input"], c["weight"]
    n = weight.ndim - 2
    stride, dilation = per_dimension(c["stride"], n), per_dimension(c["dilation"], n)
    padding = (
        _same_padding(weight, dilation)
        if c["padding"] == "same"
        else [(0, 0)] * n
        if c["padding"] == "valid"
        else [(p, p) for p in per_dimension(c["padding"], n)]
    )
    batched = x.ndim == n + 2
    whole = x if batched else x.map(lambda t: t.unsqueeze(0))
    if not whole.data.numel():
        raise NoOracle("convolution of an empty tensor")
    out = _convolve(whole, weight, stride, padding, dilation, c["groups"])
    return _with_bias(c, out if batched else out.map(lambda t: t[0]), batched)


def _with_bias(c: Call, out: Expected, batched: bool) -> Expected:
    bias = c["bias"]
    if bias is None:
        return Expected(out.data.to(c.plain().dtype), out.mask)
    channel = [-1] + [1] * (out.ndim - (2 if batched else 1))
    return added(c, out, bias.map(lambda t: t.reshape(channel)))


@oracle("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def conv_transpose(c: Call) -> Expected:
    """A convolution of the input, its elements `stride` apart, with the flipped weight; the gaps do not count."""
    x, weight = c["input"], c["weight"]
    n, groups = weight.ndim - 2, c["groups"]
    stride, dilation = per_dimension(c["stride"], n), per_dimension(c["dilation"], n)
    padding, extra = per_dimension(c["padding"], n), per_dimension(c["output_padding"], n)
    batched = x.ndim == n + 2
    whole = x if batched else x.map(lambda t: t.unsqueeze(0))
    sizes = [(s - 1) * stride[d] + 1 for d, s in enumerate(whole.shape[2:])]
    elements = (slice(None), slice(None), *(slice(None, None, stride[d]) for d in range(n)))
    data = torch.zeros(*whole.shape[:2], *sizes, dtype=x.data.dtype)
    data[elements] = whole.data
    known = torch.zeros(data.shape, dtype=torch.bool)
    known[elements] = whole.mask
    inside = torch.zeros(data.shape, dtype=torch.bool)
    inside[elements] = True
    group_in, group_out = weight.shape[0] // groups, weight.shape[1]

    def flip(t: Tensor) -> Tensor:
        split = t.reshape(groups, group_in, group_out, *t.shape[2:]).transpose(1, 2)
        return split.reshape(groups * group_out, group_in, *t.shape[2:]).flip(list(range(2, t.ndim)))

    flipped = weight.map(flip)
    reach = [dilation[d] * (weight.shape[2 + d] - 1) - padding[d] for d in range(n)]
    pads = [(reach[d], reach[d] + extra[d]) for d in range(n)]
    crop = [max(0, -low) for low, _ in pads]
    ends = [max(0, -high) for _, high in pads]
    pads = [(max(0, low), max(0, high)) for low, high in pads]
    sliced = (slice(None), slice(None), *(slice(crop[d], sizes[d] - ends[d]) for d in range(n)))
    one = [1] * n
    out = _convolve(Expected(data[sliced], known[sliced]), flipped, one, pads, dilation, groups)
    # A result that no element of the input contributes to, valid or not, is torch's own, and valid.
    every_tap = valid(torch.ones(flipped.shape))
    reachable = _reached(inside[sliced], every_tap, pads, dilation, groups)
    out = Expected(out.data, torch.where(reachable, out.mask, True))
    return _with_bias(c, out if batched else out.map(lambda t: t[0]), batched)


def _reached(
    inside: Tensor, weight: Expected, pads: Sequence[tuple[int, int]], dilation: Sequence[int], groups: int
) -> Tensor:
    """The results to which an element of the input contributes."""
    counted = valid(inside.to(torch.float32))
    return _convolve(counted, weight, [1] * len(pads), pads, dilation, groups).data > 0.5


# --------------------------------------------------------------------------- attention written out, one query at a time


@oracle("scaled_dot_product_attention", "_scaled_dot_product_attention_math")
def attention(c: Call) -> Expected:
    """Softmax over the keys that share a valid feature with the query; each output feature sums over valid values.

    Valid where the query has a valid feature and may attend to a key that shares one with it and whose value is valid
    in the output's feature. A query that has no keys because of attn_mask alone has torch's own result.
    """
    if c["dropout_p"]:
        raise NoOracle("attention with dropout")
    q, k, v = c["query"], c["key"], c["value"]
    plain = c.plain()
    plain = plain if isinstance(plain, Tensor) else plain[0]
    lead = plain.shape[:-2]
    if c.get("enable_gqa"):
        k, v = (_repeat_heads(x, q.shape[-3] // x.shape[-3]) for x in (k, v))
    length, source = q.shape[-2], k.shape[-2]
    allowed, bias, bias_known = _attention_mask(c, (*lead, length, source), plain.dtype)
    queries, keys, values = (_one_batch(x, lead) for x in (q, k, v))
    scale = c["scale"] if c["scale"] is not None else 1 / math.sqrt(q.shape[-1])
    allowed, bias, bias_known = (t.reshape(-1, length, source) for t in (allowed, bias, bias_known))
    torchs = plain.reshape(-1, length, plain.shape[-1])
    rows: list[Tensor] = []
    known: list[Tensor] = []
    zero = torch.zeros((), dtype=q.data.dtype)
    for b in range(len(queries.data)):
        for i in range(length):
            shared = queries.mask[b, i] & keys.mask[b]
            products = torch.where(shared, queries.data[b, i] * keys.data[b], zero)
            score = products.sum(-1) * scale + bias[b, i]
            query_known = bool(queries.mask[b, i].any()) or not q.shape[-1]
            if not bool(allowed[b, i].any()):
                rows.append(torchs[b, i])
                known.append(torch.full((v.shape[-1],), query_known))
                continue
            attended = shared.any(-1) & bias_known[b, i] & allowed[b, i]
            weights = torch.zeros(source, dtype=score.dtype)
            if bool(attended.any()):
                weights = weights.index_put((attended.nonzero()[:, 0],), score[attended].softmax(-1))
            usable = attended[:, None] & values.mask[b]
            weighted = torch.where(usable, weights[:, None] * values.data[b], torch.zeros((), dtype=v.data.dtype))
            rows.append(weighted.sum(0))
            known.append(usable.any(0) & query_known)
    if not rows:
        return valid(plain)
    return Expected(torch.stack(rows).reshape(plain.shape).to(plain.dtype), torch.stack(known).reshape(plain.shape))


def _repeat_heads(x: Expected, repeats: int) -> Expected:
    """Each head of a key or value for the query heads that share it."""
    return x.map(lambda t: t.repeat_interleave(repeats, -3))


def _one_batch(x: Expected, lead: Sequence[int]) -> Expected:
    """(batches, length, features), broadcast over the leading dimensions of the result."""
    return x.map(lambda t: t.expand(*lead, *x.shape[-2:]).reshape(-1, *x.shape[-2:]))


def _attention_mask(c: Call, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The keys that a query may attend to, the bias added to its scores, and where attn_mask is valid."""
    allowed = torch.ones(shape, dtype=torch.bool)
    bias = torch.zeros(shape, dtype=dtype)
    known = torch.ones(shape, dtype=torch.bool)
    attn_mask = c["attn_mask"]
    if attn_mask is not None:
        known = attn_mask.mask.expand(shape)
        if attn_mask.data.dtype is torch.bool:
            allowed = attn_mask.data.expand(shape)
        else:
            bias = attn_mask.data.to(dtype).expand(shape)
            allowed = attn_mask.data.expand(shape) != -math.inf
            bias = torch.where(allowed, bias, torch.zeros((), dtype=dtype))
    if c["is_causal"]:
        allowed = allowed & torch.ones(shape[-2:], dtype=torch.bool).tril()
    return allowed, bias, known
