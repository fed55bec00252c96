"""Attention written out, one query at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from op_registry.conformance.oracles.slots import Call, NoOracle, Slot, oracle


@oracle("scaled_dot_product_attention", "_scaled_dot_product_attention_math")
def attention(c: Call) -> Slot:
    """Softmax over the keys that share a valid feature with the query; each output feature over valid values.

    Valid where the query has a valid feature and some key that it may attend to is valid for it and in that feature; a
    query that attn_mask alone leaves without keys gives torch's own result.
    """
    if c["dropout_p"]:
        raise NoOracle("attention with dropout")
    q, k, v = c["query"], c["key"], c["value"]
    plain = c.plainly()
    plain = plain if isinstance(plain, Tensor) else plain[0]
    lead = plain.shape[:-2]
    if c.get("enable_gqa"):
        k, v = (
            Slot(s.data.repeat_interleave(r, -3), s.mask.repeat_interleave(r, -3))
            for s in (k, v)
            for r in [q.shape[-3] // s.shape[-3]]
        )
    length, source = q.shape[-2], k.shape[-2]
    allowed, bias, bias_known = _attention_mask(c, (*lead, length, source), plain.dtype)
    flat = [
        (
            s.data.expand(*lead, *s.shape[-2:]).reshape(-1, *s.shape[-2:]),
            s.mask.expand(*lead, *s.shape[-2:]).reshape(-1, *s.shape[-2:]),
        )
        for s in (q, k, v)
    ]
    scale = c["scale"] if c["scale"] is not None else 1 / math.sqrt(q.shape[-1])
    allowed, bias, bias_known = (t.reshape(-1, length, source) for t in (allowed, bias, bias_known))
    own = plain.reshape(-1, length, plain.shape[-1])
    rows: list[Tensor] = []
    known: list[Tensor] = []
    (qs, qm), (ks, km), (vs, vm) = flat
    for b in range(len(qs)):
        for i in range(length):
            shared = qm[b, i] & km[b]
            score = torch.where(shared, qs[b, i] * ks[b], torch.zeros((), dtype=qs.dtype)).sum(-1) * scale + bias[b, i]
            fit = shared.any(-1) & bias_known[b, i]
            may = allowed[b, i]
            query_known = bool(qm[b, i].any()) or not q.shape[-1]
            if not bool(may.any()):
                rows.append(own[b, i])
                known.append(torch.full((v.shape[-1],), query_known))
                continue
            takes_part = fit & may
            weights = torch.zeros(source, dtype=score.dtype)
            if bool(takes_part.any()):
                weights = weights.index_put((takes_part.nonzero()[:, 0],), score[takes_part].softmax(-1))
            usable = takes_part[:, None] & vm[b]
            rows.append(torch.where(usable, weights[:, None] * vs[b], torch.zeros((), dtype=vs.dtype)).sum(0))
            known.append(usable.any(0) & query_known)
    if not rows:
        return Slot(plain, torch.ones(plain.shape, dtype=torch.bool))
    return Slot(torch.stack(rows).reshape(plain.shape).to(plain.dtype), torch.stack(known).reshape(plain.shape))


def _attention_mask(c: Call, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Which keys a query may attend to, what is added to its scores, and where that is known."""
    allowed = torch.ones(shape, dtype=torch.bool)
    bias = torch.zeros(shape, dtype=dtype)
    known = torch.ones(shape, dtype=torch.bool)
    given = c["attn_mask"]
    if given is not None:
        known = given.mask.expand(shape)
        if given.data.dtype is torch.bool:
            allowed = given.data.expand(shape)
        else:
            bias = given.data.to(dtype).expand(shape)
            allowed = given.data.expand(shape) != -math.inf
            bias = torch.where(allowed, bias, torch.zeros((), dtype=dtype))
    if c["is_causal"]:
        allowed = allowed & torch.ones(shape[-2:], dtype=torch.bool).tril()
    return allowed, bias, known
