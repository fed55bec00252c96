"""Fused layers of torch.nn in eval mode, batch first: nn.MultiheadAttention and nn.TransformerEncoderLayer.

Law: the laws of attention (rules.py), linear layers and norms, from which these layers are composed. With every element
valid, dense records run torch's own kernel. Packed batches stay packed; for padded batches, an encoder layer skips the
padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from op_registry.authoring import (
    ATTENTION,
    QUERY,
    Bound,
    ByArgument,
    Dense,
    Equation,
    NotLowered,
    Permuted,
    Rule,
    Sparse,
    aligned_validity,
    all_valid,
    by_rule,
    call,
    data_of,
    masked_rule,
    on_call,
)
from op_registry.ops.attention import tokens
from op_registry.records.fill import hand_on

aten = torch.ops.aten

# How a layer calls its operators: `on_dense` on dense records, `call` on packed ones.
Call = Callable[..., Any]


def on_dense(op: OpOverload, x: Dense, *args: Any, **kwargs: Any) -> Any:
    """Run the operator by its rule. Moving heads keeps the record's remembered zeros (records/fill.py)."""
    result = by_rule(op, x, *args, **kwargs)
    if op in _MOVES and x.validity is not None:
        for part in result if isinstance(result, (list, tuple)) else [result]:
            hand_on(x.data, part.data, part.validity, x.validity)
    return result


_MOVES = (aten.view.default, aten.transpose.int, aten.split_with_sizes.default, aten.clone.default)


def in_heads(run: Call, x: Dense | Sparse, heads: int) -> Any:
    """(B, T, D) as (B, heads, T, D / heads)."""
    parts = run(aten.view.default, x, [*x.shape[:2], heads, x.shape[2] // heads])
    return run(aten.transpose.int, parts, 1, 2)


def merged_heads(run: Call, x: Any) -> Any:
    """(B, heads, T, D) as (B, T, heads · D)."""
    rows = run(aten.clone.default, run(aten.transpose.int, x, 1, 2), memory_format=torch.contiguous_format)
    return run(aten.view.default, rows, [*rows.shape[:2], rows.shape[2] * rows.shape[3]])


def projections(run: Call, inputs: Sequence[Any], qkv_weight: Any, qkv_bias: Any) -> list[Any]:
    """Queries, keys and values; a single product computes all three if they project the same input."""
    query, key, value = inputs
    embed_dim = query.shape[-1]
    if query is key and key is value:
        projected = run(aten.linear.default, query, qkv_weight, qkv_bias)
        return list(run(aten.split_with_sizes.default, projected, [embed_dim] * 3, -1))

    def part(packed: Any, i: int) -> Any:
        return None if packed is None else run(aten.slice.Tensor, packed, 0, i * embed_dim, (i + 1) * embed_dim)

    return [run(aten.linear.default, x, part(qkv_weight, i), part(qkv_bias, i)) for i, x in enumerate(inputs)]


def attended(run: Call, inputs: Sequence[Any], c: Bound, need_weights: bool, average: bool = True) -> tuple[Any, Any]:
    """Attention of queries to keys and values in the heads, with the weights and the mask of a call; and its weights.

    The call's `mask` is True (or non-zero) where a key is *excluded*: ``mask_type`` 0 for every query and key (L, S), 1
    for every key of a sample (B, S), 2 for both (B, heads, L, S).
    """
    q, k, v = (in_heads(run, x, _heads(c)) for x in projections(run, inputs, c.qkv_weight, c.qkv_bias))
    allowed = None
    if c.mask is not None:
        excluded, validity = c.mask.data.to(torch.bool), aligned_validity(c.mask)
        if c.mask_type == 1:
            excluded = excluded[:, None, None]
            validity = None if validity is None else validity[:, None, None]
        dtype = inputs[0].dtype
        allowed = Dense(torch.zeros_like(excluded, dtype=dtype).masked_fill(excluded, -torch.inf), validity)
    if need_weights:
        mixed, weights = run(aten._scaled_dot_product_attention_math.default, q, k, v, allowed)
        if average:
            weights = run(aten.mean.dim, weights, [1])
    else:
        mixed = run(aten.scaled_dot_product_attention.default, q, k, v, allowed)
        weights = None
    return run(aten.linear.default, merged_heads(run, mixed), c.proj_weight, c.proj_bias), weights


def _heads(c: Bound) -> int:
    return c["num_heads" if "num_heads" in c else "num_head"]


def _multi_head_attention(run: Call, c: Bound) -> tuple[Any, Any]:
    result, weights = attended(run, (c.query, c.key, c.value), c, c.need_weights, c.average_attn_weights)
    return result, Dense(c.qkv_weight.data.new_empty(0)) if weights is None else weights


_ATTENDED = "bqe,bkf,bkg,?,?,?,?,?->bqO,"


@masked_rule(
    aten._native_multi_head_attention.default,
    category=ATTENTION,
    takes_call=True,
    dims=ByArgument(
        "need_weights",
        ByArgument("average_attn_weights", Equation(f"{_ATTENDED}bqK"), Equation(f"{_ATTENDED}bHqK")),
        Equation(_ATTENDED),
    ),
)
def _native_multi_head_attention(c: Bound) -> tuple[Dense, Dense]:
    """nn.MultiheadAttention in eval mode, batch first."""
    if all_valid(*c.named.values()):
        result, weights = c.map(data_of, Dense).applied(c.op)
        return Dense(result), Dense(weights)
    return _multi_head_attention(on_dense, c)


def _encoder_layer(run: Call, c: Bound) -> Any:
    def attend(x: Any) -> Any:
        return attended(run, (x, x, x), c, need_weights=False)[0]

    def feed_forward(x: Any) -> Any:
        hidden = run(aten.linear.default, x, c.ffn_weight_1, c.ffn_bias_1)
        hidden = run(aten.gelu.default if c.use_gelu else aten.relu.default, hidden)
        return run(aten.linear.default, hidden, c.ffn_weight_2, c.ffn_bias_2)

    def norm(x: Any, n: int) -> Any:
        return run(aten.layer_norm.default, x, [c.embed_dim], c[f"norm_weight_{n}"], c[f"norm_bias_{n}"], c.eps)

    def add(x: Any, y: Any) -> Any:
        return run(aten.add.Tensor, x, y)

    if c.norm_first:
        x = add(c.src, attend(norm(c.src, 1)))
        return add(x, feed_forward(norm(x, 2)))
    x = norm(add(c.src, attend(c.src)), 1)
    return norm(add(x, feed_forward(x)), 2)


@masked_rule(
    aten._transformer_encoder_layer_fwd.default,
    category=ATTENTION,
    takes_call=True,
    torch_if_valid=True,
    dims=Equation(f"bTE{',?' * 13}->bTE"),
)
def _transformer_encoder_layer_fwd(c: Bound) -> Dense:
    """nn.TransformerEncoderLayer in eval mode, batch first."""
    on_tokens = tokens.on_padded(_encoder_layer, c)
    return _encoder_layer(on_dense, c) if on_tokens is None else on_tokens


def _packed_encoder_layer(run: Call, c: Bound) -> Any:
    on_tokens = tokens.on_packed(_encoder_layer, c)
    return _encoder_layer(run, c) if on_tokens is None else on_tokens


def _lower(rule: Rule, layer: Callable[[Call, Bound], Any]) -> None:
    """On packed batches: the same operators, each by its own lowering."""

    @rule.lowering(Sparse)
    @rule.lowering(Permuted)
    @on_call
    def lowering(c: Bound) -> Any:
        x, width = c.first, c.embed_dim
        if 0 in x.shape or x.shape[-1] != width or tuple(c.qkv_weight.shape) != (3 * width, width) or width % _heads(c):
            raise NotLowered("it has no elements, or the sizes of its weights do not fit")  # torch's errors and results
        return layer(call, c)


_lower(_native_multi_head_attention, _multi_head_attention)
_lower(_transformer_encoder_layer_fwd, _packed_encoder_layer)


@masked_rule(aten._nested_tensor_from_mask_left_aligned.default, category=QUERY)
def _nested_tensor_from_mask_left_aligned(t: Dense, mask: Dense) -> bool:
    """Whether nn.TransformerEncoder may convert its input to a nested tensor: never, because it would lose the mask."""
    return False
