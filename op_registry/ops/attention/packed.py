"""Attention of packed batches: one sequence at a time, or all of them in one call of a kernel for sequences.

Law: that of rules.py for the padded batch. Keys that are not stored are invalid, so no query attends to them: the rule
for dense storage runs on the stored rows of each sequence, with its own kernel and without a mask for padding. Three
cases need care, since that rule does not see missing keys:

    a query whose permitted keys are all missing is invalid; one to which `attn_mask` permits no key has torch's result
    causality is by position: without a mask if queries and keys have the same sparsity pattern, else with one
    dropout is drawn for all weights of the padded batch, so that storage does not change the random numbers

Queries, keys and values are (B, T, D) as stored, or a permuted view (B, H, T, D) of stored (B, T, H, D).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from op_registry.authoring import (
    Bound,
    Dense,
    NotLowered,
    Permuted,
    Sparse,
    all_valid,
    as_int8,
    being_traced,
    intersect,
    on_call,
    shown,
)
from op_registry.ops.attention import by_bounds, in_graphs
from op_registry.ops.attention.rules import scaled_dot_product_attention
from op_registry.sparse.convert import concat_values
from op_registry.sparse.permuted import groups_of

aten = torch.ops.aten

IN_ORDER, HEADS_FIRST = groups_of((0, 1, 2)), groups_of((0, 2, 1, 3))


@scaled_dot_product_attention.lowering(Sparse)
@scaled_dot_product_attention.lowering(Permuted)
@on_call(packed="query, key, value", dense="attn_mask", elements=True)
def attention(c: Bound) -> Sparse | Permuted:
    q, k, v = (_with_time_second_to_last(x, c.query.ndim) for x in (c.query, c.key, c.value))
    if not _list_the_same(k, v) or q.shape[0] != k.shape[0]:
        raise NotLowered("keys and values have different sparsity patterns")
    same = _list_the_same(q, k)
    unrestricted = c.attn_mask is None and c.dropout_p == 0 and (same or not c.is_causal)
    unrestricted = unrestricted and all_valid(q.values, k.values, v.values)
    rows = [x.values.data for x in (q, k, v)]
    in_graph = being_traced(rows[0])
    if unrestricted and (not in_graph or by_bounds.serves(*rows)):
        values = _unrestricted(q, k, v, c.is_causal, c.scale, c.enable_gqa)
    elif unrestricted and in_graphs.serves(*rows):
        values = _in_a_graph(q, k, v, c.is_causal, c.scale)
    elif in_graph:
        raise NotLowered(
            "in a graph, attention of sequences runs on a CPU or on CUDA, on floats that are all valid, with features "
            "of one size, without attn_mask or dropout; if causal, with queries and keys of one sparsity pattern"
        )
    else:
        batch = _Batch(c, q, k, same)
        parts = zip(*(_by_sequence(x) for x in (q, k, v)), strict=True)
        outputs = [batch.attend(n, *part) for n, part in enumerate(parts)]
        values = concat_values([output.map(lambda t: _rows_first(t).squeeze(0)) for output in outputs])
    return Permuted(q.like(values), c.query.order) if isinstance(c.query, Permuted) else q.like(values)


def _with_time_second_to_last(x: Sparse | Permuted, ndim: int) -> Sparse:
    """The packed record of an operand, (B, T, D) or (B, T, H, D); NotLowered if it is not shown as attention reads."""
    base, groups = shown(x)
    if groups != (HEADS_FIRST if ndim == 4 else IN_ORDER):
        raise NotLowered("time is not the second-to-last dimension")
    return base


def _list_the_same(a: Sparse, b: Sparse) -> bool:
    """Whether two packed batches store the same rows."""
    if a.pattern.same_as(b.pattern):
        return True
    one, other = a.pattern, b.pattern
    if being_traced(one.pieces[0]):
        return False
    return one.sizes == other.sizes and all(map(torch.equal, one.pieces, other.pieces))


def _unrestricted(q: Sparse, k: Sparse, v: Sparse, is_causal: bool, scale: float | None, enable_gqa: bool) -> Dense:
    """Every query of a sequence attends to all of its stored keys; if causal, queries and keys have one pattern."""
    query, key, value = (x.values.data for x in (q, k, v))
    options = {"scale": scale, "enable_gqa": enable_gqa}
    rows = attend_sequences(query, key, value, q, k, is_causal, **options)
    if not by_bounds.serves(query, key, value) and all(k.pattern.lengths()):
        return Dense(rows)
    return _without_keys_invalid(rows, q, k)


def _without_keys_invalid(rows: Tensor, q: Sparse, k: Sparse) -> Dense:
    """Outputs of which those of sequences without keys are invalid."""
    if _list_the_same(q, k):
        return Dense(rows)
    key_bounds = k.pattern.ends()
    assert key_bounds is not None
    has_keys = as_int8(key_bounds.diff() > 0)[q.pattern.coordinates()[0]]
    return Dense(rows, has_keys.reshape(-1, *[1] * (rows.ndim - 1)).expand(rows.shape))


def attend_sequences(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Sparse,
    keys: Sparse,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Attention within each of several concatenated sequences, in rows (n, H, d) or (n, d), stored as in two batches.

    One call of a kernel that reads the bounds, where there is one; else as `attend_rows`, which needs the lengths.
    """
    if not by_bounds.serves(query, key, value):
        return attend_rows(query, key, value, queries.pattern.lengths(), keys.pattern.lengths(), is_causal, **options)
    q, k, v = (x if x.ndim == 3 else x.unsqueeze(1) for x in (query, key, value))
    longest = queries.shape[1], keys.shape[1]
    attended = by_bounds.attention(q, k, v, _bounds(queries), _bounds(keys), *longest, is_causal, options.get("scale"))
    return attended.view(*query.shape[:-1], value.shape[-1])


def _bounds(x: Sparse) -> Tensor:
    """The first row of each sequence, and the end of the last one, as kernels take them."""
    ends = x.pattern.ends()
    assert ends is not None
    return x.pattern.cached("int32 bounds", lambda: ends.to(torch.int32))


def attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Sequence[int],
    keys: Sequence[int],
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Attention within each of several concatenated sequences, in rows (n, H, d) or (n, d).

    This runs torch's kernel once if all sequences have the same length, else once for each sequence. `queries` and
    `keys` are the lengths; the rows of a sequence without keys are 0.
    """
    if len(set(queries)) == 1 and len(set(keys)) == 1 and queries[0] and keys[0]:
        batch = [_heads_first(x.unflatten(0, (len(queries), -1))) for x in (query, key, value)]
        output = aten.scaled_dot_product_attention(*batch, None, 0.0, is_causal, **options)
        return _rows_first(output).flatten(0, 1)
    # Split in the stored order: gradients are then concatenated in that order, with a single copy.
    parts = [
        map(_heads_first, x.unsqueeze(0).split_with_sizes(lengths, 1))
        for x, lengths in ((query, queries), (key, keys), (value, keys))
    ]
    outputs = []
    for q, k, v, key_count in zip(*parts, keys, strict=True):
        if key_count and q.shape[-2]:
            attended = aten.scaled_dot_product_attention(q, k, v, None, 0.0, is_causal, **options)
        else:
            attended = _zeros_of(q, k, v)
        outputs.append(_rows_first(attended))
    return torch.cat(outputs, 1).squeeze(0)


def _in_a_graph(q: Sparse, k: Sparse, v: Sparse, is_causal: bool, scale: float | None) -> Dense:
    """Run one operator on all sequences; it reads their bounds when the graph runs."""
    query, key, value = (x.values.data if x.values.ndim == 3 else x.values.data.unsqueeze(1) for x in (q, k, v))
    groups = query.shape[1] // key.shape[1]
    key, value = (x if groups == 1 else x.repeat_interleave(groups, 1) for x in (key, value))
    query_bounds, key_bounds = q.pattern.ends(), k.pattern.ends()
    assert query_bounds is not None
    assert key_bounds is not None
    rows, _ = in_graphs.attention(query, key, value, query_bounds, key_bounds, is_causal, scale)
    return _without_keys_invalid(rows.view(*q.values.shape[:-1], v.values.shape[-1]), q, k)


def _by_sequence(x: Sparse) -> list[Dense]:
    """The rows of each sequence, (1, H, length, D) or (1, length, D); one split, so that gradients are joined once."""
    lengths = x.pattern.lengths()
    data = x.values.data.split_with_sizes(lengths)
    v = x.values.full_validity
    validity = [None] * len(data) if v is None else v.split_with_sizes(lengths)
    return [Dense(d, m).map(lambda t: _heads_first(t.unsqueeze(0))) for d, m in zip(data, validity, strict=True)]


def _heads_first(x: Tensor) -> Tensor:
    """(batch, T, H, D) → (batch, H, T, D); (batch, T, D) unchanged. Self-inverse."""
    return x.transpose(1, 2) if x.ndim == 4 else x


_rows_first = _heads_first


class _Batch:
    """The masks and dropout of one call, shared by its sequences."""

    def __init__(self, c: Bound, q: Sparse, k: Sparse, same: bool) -> None:
        self.c, self.same, self.keys = c, same, k.shape[1]
        self.attn_mask = None
        shape = (*c.query.shape[:-1], self.keys)
        if c.attn_mask is not None:
            self.attn_mask = c.attn_mask.map(lambda t: t.expand(_broadcast_to(t.shape, shape)))
        # The positions in time of queries and keys of each sequence, where they are needed.
        self.positions: list[tuple[Tensor, Tensor]] = []
        if c.attn_mask is not None or c.dropout_p > 0 or (c.is_causal and not same):
            query_positions, key_positions = (
                x.pattern.pieces[1].to(torch.int64).split(x.pattern.lengths()) for x in (q, k)
            )
            self.positions = list(zip(query_positions, key_positions, strict=True))
        self.dropout_factors: Tensor | None = None
        if c.dropout_p > 0:
            self.dropout_factors = aten.dropout(q.values.data.new_ones(shape), c.dropout_p, True)

    def attend(self, n: int, q: Dense, k: Dense, v: Dense) -> Dense:
        """The outputs of sequence `n`."""
        if q.shape[-2] == 0:
            return Dense(_zeros_of(q.data, k.data, v.data))
        mask, has_key = self._restriction(n, q)
        causal = self.c.is_causal and mask is None
        if k.shape[-2] == 0:
            # Not torch's result without keys: the sequence has keys, but all of them are invalid.
            data = _zeros_of(q.data, k.data, v.data)
            has_key = torch.zeros_like(data[..., :1], dtype=torch.bool) if has_key is None else has_key
            return Dense(data, as_int8(has_key.expand(data.shape)))
        if self.dropout_factors is None:
            options = {"scale": self.c.scale, "enable_gqa": self.c.enable_gqa}
            output = scaled_dot_product_attention.run(q, k, v, mask, 0.0, causal, **options)
        else:
            output = self._with_dropout(n, q, k, v, mask, causal)
        if has_key is None:
            return output
        return Dense(output.data, intersect(output.full_validity, as_int8(has_key.expand(output.shape).contiguous())))

    def _restriction(self, n: int, q: Dense) -> tuple[Dense | None, Tensor | None]:
        """Mask and causality for the stored keys; which queries have a stored key, or no permitted key at all."""
        if self.attn_mask is None and (not self.c.is_causal or self.same):
            return None, None
        at_query, at_key = self.positions[n]
        permitted: Tensor | None = None  # for all keys of the padded batch
        if self.c.is_causal:
            permitted = at_query[:, None] >= torch.arange(self.keys, device=q.device)
        mask: Dense | None = None  # for the stored keys
        if self.attn_mask is not None:
            of_queries = self.attn_mask.map(lambda t: t.narrow(0, min(n, t.shape[0] - 1), 1).index_select(-2, at_query))
            mask = of_queries.map(lambda t: t.index_select(-1, at_key))
            filled = of_queries.filled(of_queries.dtype is torch.bool)
            by_mask = filled if filled.dtype is torch.bool else filled != -torch.inf
            permitted = by_mask if permitted is None else by_mask & permitted
        assert permitted is not None
        permitted_stored = permitted.index_select(-1, at_key)
        has_key = permitted_stored.any(-1, keepdim=True) | ~permitted.any(-1, keepdim=True)
        if mask is None:
            return Dense(permitted_stored), has_key
        if self.c.is_causal:
            causal = at_query[:, None] >= at_key
            if mask.dtype is torch.bool:
                mask = mask.like(mask.data & causal)
            else:
                mask = mask.like(torch.where(causal, mask.data, -torch.inf))
        return mask, has_key

    def _with_dropout(self, n: int, q: Dense, k: Dense, v: Dense, mask: Dense | None, causal: bool) -> Dense:
        """The same, operator by operator, with the dropout that was drawn for these weights."""
        if not all(x.validity is None for x in (q, k, v)) or (mask is not None and mask.validity is not None):
            raise NotLowered("with dropout, all stored rows must be valid")
        assert self.dropout_factors is not None
        at_query, at_key = self.positions[n]
        keys, values = k.data, v.data
        if self.c.enable_gqa:
            keys, values = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (keys, values))
        scale = self.c.scale
        scores = q.data @ keys.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        if causal:
            mask = Dense(torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril())
        if mask is not None:
            is_bias = mask.data.dtype is not torch.bool
            scores = scores + mask.data if is_bias else scores.masked_fill(~mask.data, -torch.inf)
        weights = aten._safe_softmax(scores, -1)
        factors = self.dropout_factors[n : n + 1].index_select(-2, at_query).index_select(-1, at_key)
        return Dense((weights * factors) @ values)


def _zeros_of(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Outputs of 0 that are connected to queries, keys and values in the graph, without reading their values."""
    empty_sums = [x[..., :0].sum() for x in (query, key, value)]
    return sum(empty_sums, query.new_zeros((*query.shape[:-1], value.shape[-1])))


def _broadcast_to(mask_shape: torch.Size, shape: tuple[int, ...]) -> tuple[int, ...]:
    """`mask_shape` with the dimensions of `shape`, expanded in the last two; NotLowered where it does not broadcast."""
    padded = (1,) * (len(shape) - len(mask_shape)) + tuple(mask_shape)
    if len(mask_shape) > len(shape) or any(a not in (1, b) for a, b in zip(padded, shape, strict=True)):
        raise NotLowered(f"attn_mask of shape {tuple(mask_shape)} does not broadcast to weights of shape {shape}")
    return (*padded[:-2], *shape[-2:])
