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

from op_registry.conformance.oracles.call import (
    Call,
    Expected,
    NoOracle,
    Refused,
    all_true,
    broadcast_valid,
    groups,
    map_groups,
    oracle,
    slices,
    valid,
)


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


# ----------------------------------------------------------------------------------------------------- convolutions


@oracle("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def convolution(c: Call) -> Expected:
    """The sum over taps whose input and weight are both valid; a result without taps, in padding and gaps, is valid."""
    x, weight, bias = c["input"], c["weight"], c["bias"]
    if not x.data.numel():
        raise NoOracle("convolution of an empty tensor")
    wide = torch.promote_types(x.data.dtype, torch.float32) if x.data.is_floating_point() else x.data.dtype

    def summed(elements: Tensor, of_weight: Tensor) -> Tensor:
        taps: Tensor = c.plain(input=elements, weight=of_weight, bias=None)
        return taps

    def counted(elements: Tensor, of_weight: Tensor) -> Tensor:
        return summed(elements.to(torch.float32), of_weight.to(torch.float32))

    total = summed(x.filled(0).to(wide), weight.filled(0).to(wide))
    taps, every_tap = counted(x.mask, weight.mask), counted(all_true(x.data), all_true(weight.data))
    out = Expected(total, (taps > 0.5) | (every_tap < 0.5))
    channels = [-1] + [1] * (weight.ndim - 2)
    return added(c, out, None if bias is None else bias.map(lambda t: t.reshape(channels)))


# ------------------------------------------------------------------------------- attention, as two sums and a softmax


@oracle("scaled_dot_product_attention", "_scaled_dot_product_attention_math")
def attention(c: Call) -> Expected:
    return _attended(c)[0]


@oracle("_scaled_dot_product_flash_attention_for_cpu")
def attention_with_logsumexp(c: Call) -> tuple[Expected, Expected]:
    """The logsumexp of a query's scores is valid if the query may attend to a key."""
    out, scores = _attended(c)
    plain = c.plain()[1]
    data = scores.data.masked_fill(~scores.mask, -math.inf).logsumexp(-1).reshape(plain.shape).to(plain.dtype)
    return out, Expected(data, scores.mask.any(-1).reshape(plain.shape))


def _attended(c: Call) -> tuple[Expected, Expected]:
    """Softmax over the keys that share a valid feature with the query; each output feature sums over valid values.

    With the scores, (batches, queries, keys).

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
    queries, keys, values = (_one_batch(x, lead) for x in (q, k, v))
    allowed, bias = _attention_mask(c, (*lead, q.shape[-2], k.shape[-2]), plain.dtype)
    scale = c["scale"] if c["scale"] is not None else 1 / math.sqrt(q.shape[-1])
    products = tuples("bqf,bkf->bqk", queries, keys)
    scores = Expected(products.data * scale + bias.data, products.mask & bias.mask & allowed)
    each = groups([scores], slices(scores.shape, [2]))
    weights: Expected = map_groups(each, lambda group: group.values[0].softmax(0), scores.data, scores.mask)
    out = tuples("bqk,bkd->bqd", weights, values, dtype=plain.dtype)
    known, without_keys = queries.mask.any(-1, keepdim=True), ~allowed.any(-1, keepdim=True)
    mask = known & (out.mask | without_keys)
    data = torch.where(without_keys, plain.reshape(out.shape), out.data) if bool(without_keys.any()) else out.data
    return Expected(data.reshape(plain.shape), mask.reshape(plain.shape)), scores


def _repeat_heads(x: Expected, repeats: int) -> Expected:
    """Each head of a key or value for the query heads that share it."""
    return x.map(lambda t: t.repeat_interleave(repeats, -3))


def _one_batch(x: Expected, lead: Sequence[int]) -> Expected:
    """(batches, length, features), broadcast over the leading dimensions of the result."""
    return x.map(lambda t: t.expand(*lead, *x.shape[-2:]).reshape(-1, *x.shape[-2:]))


def _attention_mask(c: Call, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Expected]:
    """The keys that a query may attend to, and the bias added to its scores, masked as attn_mask is."""
    allowed, given = torch.ones(shape, dtype=torch.bool), c["attn_mask"]
    bias = valid(torch.zeros(shape, dtype=dtype)) if given is None else given.map(lambda t: t.expand(shape))
    if bias.data.dtype is torch.bool:
        allowed, bias = bias.data, Expected(torch.zeros(shape, dtype=dtype), bias.mask)
    elif given is not None:
        allowed = bias.data != -math.inf
        bias = Expected(torch.where(allowed, bias.data.to(dtype), 0), bias.mask)
    if c["is_causal"]:
        allowed = allowed & torch.ones(shape[-2:], dtype=torch.bool).tril()
    return allowed.reshape(-1, *shape[-2:]), bias.map(lambda t: t.reshape(-1, *shape[-2:]))
