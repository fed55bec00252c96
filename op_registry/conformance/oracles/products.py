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


# ----------------------------------------------------------------------------------- convolutions, as linear functions


def on_units(c: Call, operand: str, sizes: Sequence[int], dtype: torch.dtype, **changes: object) -> Tensor:
    """(elements, elements of a result): the operator on samples of these sizes, 1 at one element and 0 elsewhere."""
    units = torch.eye(math.prod(sizes), dtype=dtype).reshape(-1, *sizes)
    result = c.plain(**{operand: units, **changes})
    first: Tensor = result if isinstance(result, Tensor) else result[0]
    return first.flatten(1)


@oracle("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def convolution(c: Call) -> Expected:
    """The sum over taps whose input and weight are both valid; a result without taps, in padding and gaps, is valid."""
    x, weight, bias, plain = c["input"], c["weight"], c["bias"], c.plain()
    sizes = x.shape[1 - weight.ndim :]
    if not x.data.numel():
        raise NoOracle("convolution of an empty tensor")
    wide = torch.promote_types(x.data.dtype, torch.float32) if x.data.is_floating_point() else x.data.dtype
    samples = x.map(lambda t: t.reshape(-1, math.prod(sizes)))

    def summed(values: Tensor, weights: Tensor) -> Tensor:
        return values @ on_units(c, "input", sizes, values.dtype, weight=weights.to(values.dtype), bias=None)

    total = summed(samples.filled(0).to(wide), weight.filled(0))
    taps = summed(samples.mask.to(torch.float32), weight.mask)
    every_tap = summed(torch.ones_like(taps[:1, :1]).expand(1, samples.shape[1]), torch.ones(weight.shape))
    out = Expected(total.reshape(plain.shape), ((taps > 0.5) | (every_tap < 0.5)).reshape(plain.shape))
    channels = [-1] + [1] * (weight.ndim - 2)
    return added(c, out, None if bias is None else bias.map(lambda t: t.reshape(channels)))


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
