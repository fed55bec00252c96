"""Attention written out, one query at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from op_registry.conformance.oracles.call import Call, Expected, NoOracle, oracle, valid


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
