"""Attention of packed batches, one sequence at a time.

Law: as attention.py has it for the padded batch. A key that is not stored is invalid, so no query may attend to it, and
it is not there; the rule for dense storage runs on what is there of each sequence, with its own kernel and without a
mask for padding. Three things are left to say, since that rule does not see what is not there:

    a query all of whose permitted keys are missing is invalid; one to which `attn_mask` permits none is torch's result
    causal is by position: the same as by order where queries and keys are stored in the same places, else a mask
    dropout is drawn for all weights of the padded batch, so that storage does not change the stream of random numbers

Queries, keys and values are (B, T, D) as they are stored, or (B, H, T, D) seen of (B, T, H, D).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    PACKED,
    Dense,
    NotLowered,
    Permuted,
    Sparse,
    all_valid,
    as_int8,
    being_traced,
    concat_values,
    intersect,
)
from op_registry.ops.attention.rules import scaled_dot_product_attention

aten = torch.ops.aten

HEADS_FIRST = (0, 2, 1, 3)


def attention(
    op: OpOverload,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    q, k, v = (_stored_by_sequence(x, query) for x in (query, key, value))
    if not k.pattern.same_as(v.pattern) or q.shape[0] != k.shape[0]:
        raise NotLowered("keys and values are not stored in the same places")
    if attn_mask is not None and not isinstance(attn_mask, Dense):
        raise NotLowered("attn_mask is sparse")
    if 0 in query.shape or 0 in key.shape or 0 in value.shape:
        raise NotLowered("there is nothing in it")
    same = q.pattern.same_as(k.pattern)
    in_order = attn_mask is None and dropout_p == 0 and (same or not is_causal)
    if in_order and all_valid(q.values, k.values, v.values):
        alike = all(len(set(x.pattern.lengths())) == 1 for x in (q, k)) and 0 not in (
            q.pattern.stored,
            k.pattern.stored,
        )
        values = (_at_once if alike else _one_by_one)(q, k, v, is_causal, scale, enable_gqa)
    else:
        batch = _Batch(q, k, attn_mask, is_causal, dropout_p, query)
        parts = zip(*(_by_sequence(x) for x in (q, k, v)), strict=True)
        outputs = [batch.attend(n, *part, scale=scale, enable_gqa=enable_gqa) for n, part in enumerate(parts)]
        values = concat_values([output.map(lambda t: _rows_first(t).squeeze(0)) for output in outputs])
    return Permuted(q.like(values), query.order) if isinstance(query, Permuted) else q.like(values)


scaled_dot_product_attention.lowering(Sparse)(attention)
scaled_dot_product_attention.lowering(Permuted)(attention)


def _stored_by_sequence(x: Any, query: Any) -> Sparse:
    """The record of a batch of sequences, (B, T, D) or (B, T, H, D)."""
    base = x.base if isinstance(x, Permuted) else x
    if not isinstance(base, Sparse) or base.pattern.layout is not PACKED:
        raise NotLowered("queries, keys and values are not all packed")
    order = x.order if isinstance(x, Permuted) else tuple(range(x.ndim))
    if order != ((0, 1, 2) if query.ndim == 3 else HEADS_FIRST):
        raise NotLowered("time is not the dimension before the last")
    if being_traced(base.values.data) or being_traced(base.pattern.pieces[0]):
        raise NotLowered("how long each sequence is, is not known while tracing")
    return base


def _at_once(q: Sparse, k: Sparse, v: Sparse, is_causal: bool, scale: float | None, enable_gqa: bool) -> Dense:
    """Sequences of one length: a batch without padding."""
    count = len(q.pattern.lengths())
    given = [_heads_first(x.values.data.unflatten(0, (count, -1))) for x in (q, k, v)]
    output = aten.scaled_dot_product_attention(*given, None, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    return Dense(_rows_first(output).flatten(0, 1))


def _one_by_one(q: Sparse, k: Sparse, v: Sparse, is_causal: bool, scale: float | None, enable_gqa: bool) -> Dense:
    """One call of torch's kernel for each sequence, on its rows as they lie."""
    queries, keys = q.pattern.lengths(), k.pattern.lengths()
    # Divided as they lie: gradients are then joined as they lie, and copied once.
    parts = [
        map(_heads_first, x.values.data.unsqueeze(0).split_with_sizes(lengths, 1))
        for x, lengths in ((q, queries), (k, keys), (v, keys))
    ]
    outputs = []
    for query, key, value, there in zip(*parts, keys, strict=True):
        if there and query.shape[-2]:
            attended = aten.scaled_dot_product_attention(
                query, key, value, None, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        else:
            attended = _zeros_of(query, key, value)
        outputs.append(_rows_first(attended))
    rows = torch.cat(outputs, 1).squeeze(0)
    if all(keys):
        return Dense(rows)
    served = torch.tensor([n > 0 for n in keys], device=rows.device).to(torch.int8)[q.pattern.places()[0]]
    return Dense(rows, served.reshape(-1, *[1] * (rows.ndim - 1)).expand(rows.shape))


def _by_sequence(x: Sparse) -> list[Dense]:
    """The rows of each sequence, (1, H, length, D) or (1, length, D); divided at once, as gradients are joined."""
    lengths = x.pattern.lengths()
    data = x.values.data.split_with_sizes(lengths)
    v = x.values.full_validity
    validity = [None] * len(data) if v is None else v.split_with_sizes(lengths)
    return [Dense(d, m).map(lambda t: _heads_first(t.unsqueeze(0))) for d, m in zip(data, validity, strict=True)]


def _heads_first(rows: Tensor) -> Tensor:
    """(batch, T, H, D) → (batch, H, T, D); (batch, T, D) as it is."""
    return rows.transpose(1, 2) if rows.ndim == 4 else rows


_rows_first = _heads_first


class _Batch:
    """What the sequences of one call have in common."""

    def __init__(
        self, q: Sparse, k: Sparse, attn_mask: Dense | None, is_causal: bool, dropout_p: float, query: Any
    ) -> None:
        self.same = q.pattern.same_as(k.pattern)
        self.is_causal = is_causal
        self.keys = k.shape[1]
        self.dropout_p = dropout_p
        self.attn_mask = None
        if attn_mask is not None:
            shape = (*query.shape[:-1], self.keys)
            self.attn_mask = attn_mask.map(lambda t: t.expand(_broadcast_to(t.shape, shape)))
        self.positions: Any = None
        if attn_mask is not None or dropout_p > 0 or (is_causal and not self.same):
            self.positions = [
                (a, b)
                for a, b in zip(
                    q.pattern.pieces[1].to(torch.int64).split(q.pattern.lengths()),
                    k.pattern.pieces[1].to(torch.int64).split(k.pattern.lengths()),
                    strict=True,
                )
            ]
        self.dropped: Tensor | None = None
        if dropout_p > 0:
            shape = (*query.shape[:-1], self.keys)
            self.dropped = aten.dropout(q.values.data.new_ones(shape), dropout_p, True)

    def attend(self, n: int, q: Dense, k: Dense, v: Dense, *, scale: float | None, enable_gqa: bool) -> Dense:
        """The outputs of sequence `n`."""
        if q.shape[-2] == 0:
            return Dense(_zeros_of(q.data, k.data, v.data))
        mask, served = self._restriction(n, q)
        causal = self.is_causal and mask is None
        if k.shape[-2] == 0:
            # Not the result of no keys, which is torch's: there were some, and all are invalid.
            data = _zeros_of(q.data, k.data, v.data)
            served = torch.zeros_like(data[..., :1], dtype=torch.bool) if served is None else served
            return Dense(data, as_int8(served.expand(data.shape)))
        if self.dropped is None:
            output = scaled_dot_product_attention.run(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=enable_gqa)
        else:
            output = self._with_dropout(n, q, k, v, mask, causal, scale, enable_gqa)
        if served is None:
            return output
        return Dense(output.data, intersect(output.full_validity, as_int8(served.expand(output.shape).contiguous())))

    def _restriction(self, n: int, q: Dense) -> tuple[Dense | None, Tensor | None]:
        """`attn_mask` and causality for the keys that are there, and which queries lack none but forbidden keys."""
        if self.attn_mask is None and (not self.is_causal or self.same):
            return None, None
        at_query, at_key = self.positions[n]
        everywhere = torch.arange(self.keys, device=q.device)
        permitted: Tensor | None = None
        if self.is_causal:
            permitted = at_query[:, None] >= everywhere
        rows: Dense | None = None
        if self.attn_mask is not None:
            own = self.attn_mask.map(lambda t: t.narrow(0, min(n, t.shape[0] - 1), 1).index_select(-2, at_query))
            rows = own.map(lambda t: t.index_select(-1, at_key))
            given = own.filled(own.dtype is torch.bool)
            reachable = given if given.dtype is torch.bool else given != -torch.inf
            permitted = reachable if permitted is None else reachable & permitted
        assert permitted is not None
        here = permitted.index_select(-1, at_key)
        served = here.any(-1, keepdim=True) | ~permitted.any(-1, keepdim=True)
        if rows is None:
            return Dense(here), served
        if self.is_causal:
            causal = at_query[:, None] >= at_key
            if rows.dtype is torch.bool:
                rows = rows.like(rows.data & causal)
            else:
                rows = rows.like(torch.where(causal, rows.data, -torch.inf))
        return rows, served

    def _with_dropout(
        self,
        n: int,
        q: Dense,
        k: Dense,
        v: Dense,
        mask: Dense | None,
        causal: bool,
        scale: float | None,
        enable_gqa: bool,
    ) -> Dense:
        """The same in steps, with what was drawn for these weights."""
        if not all(x.validity is None for x in (q, k, v)) or (mask is not None and mask.validity is not None):
            raise NotLowered("with dropout, rows have to be valid throughout")
        assert self.dropped is not None
        at_query, at_key = self.positions[n]
        keys, values = k.data, v.data
        if enable_gqa:
            keys, values = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (keys, values))
        scores = q.data @ keys.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        if causal:
            mask = Dense(torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril())
        if mask is not None:
            added = mask.data.dtype is not torch.bool
            scores = scores + mask.data if added else scores.masked_fill(~mask.data, -torch.inf)
        weights = aten._safe_softmax(scores, -1)
        drawn = self.dropped[n : n + 1].index_select(-2, at_query).index_select(-1, at_key)
        return Dense((weights * drawn) @ values)


def _zeros_of(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Outputs that are 0, and a graph in which queries, keys and values are: of their values, nothing is read."""
    nothing = [x[..., :0].sum() for x in (query, key, value)]
    return sum(nothing, query.new_zeros((*query.shape[:-1], value.shape[-1])))


def _broadcast_to(given: torch.Size, shape: tuple[int, ...]) -> tuple[int, ...]:
    """`given` with as many dimensions as `shape`, and its size in the last two; NotLowered where it does not fit."""
    padded = (1,) * (len(shape) - len(given)) + tuple(given)
    if len(given) > len(shape) or any(a not in (1, b) for a, b in zip(padded, shape, strict=True)):
        raise NotLowered(f"attn_mask of shape {tuple(given)} does not fit weights of shape {shape}")
    return (*padded[:-2], *shape[-2:])
