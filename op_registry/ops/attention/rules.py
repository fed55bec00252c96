"""Attention.

Law: softmax over the keys that share a valid feature with the query; each output feature is the sum over the keys whose
value is valid in it. `attn_mask` and `is_causal` restrict the keys further. An output is valid where the query has a
valid feature and at least one permitted key shares a feature with it and has a valid value in that output feature. A
query that `attn_mask` alone leaves without keys has torch's result, valid. In packed batches, `is_causal` compares the
time steps of the padded batch, counted from 0 in queries and keys alike, and not the rows in storage.

With invalid features filled with 0, scores are already sums over shared valid features, and outputs are sums over valid
values, so that torch's fused kernels can be used: only keys that share no feature with a query must be excluded, by
`attn_mask`. With one validity per token that is a mask of the size of the keys. A query without any key left attends to
the keys that `attn_mask` alone would permit, filled with zeros: its output is invalid, and its derivatives are finite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    ATTENTION,
    OPAQUE,
    QUERY,
    Bound,
    ByArgument,
    Dense,
    Equation,
    MaskedSemanticsError,
    accumulation_dtype,
    aligned_validity,
    all_valid,
    as_bool,
    being_traced,
    broadcast_along,
    data_of,
    gradients_may_flow,
    intersect,
    known_all_valid,
    masked_rule,
    packet_name,
    run_plain,
)
from op_registry.records.dense import records_in
from op_registry.records.slices import has_whole_slices
from op_registry.records.sums import product_validity, transposed
from op_registry.records.validity import is_same_memory

aten = torch.ops.aten


@dataclass(frozen=True)
class Plan:
    """How to call torch's kernel, and the validity of its results.

    attn_mask  the keys that a query may attend to, or biases; None for all
    is_causal  whether the kernel applies the causal restriction too
    rows       validity of results with one value per query (…, L or 1, 1)
    weights    validity of attention weights (…, L or 1, S or 1)
    output     validity of outputs (…, L or 1, Ev or 1)
    """

    attn_mask: Tensor | None
    is_causal: bool
    rows: Tensor | None
    weights: Tensor | None
    output: Tensor | None


def plan(
    query: Dense, key: Dense, value: Dense, attn_mask: Dense | None, is_causal: bool, enable_gqa: bool = False
) -> Plan:
    """The plan of one attention call."""
    if all_valid(query, key, value, attn_mask):
        return Plan(None if attn_mask is None else attn_mask.data, is_causal, None, None, None)
    if enable_gqa:
        key, value = (_for_every_query_head(x, query.shape[-3]) for x in (key, value))
    query_validity = query.any_valid(-1, keepdim=True) if query.shape[-1] != 0 else None
    related = _related(query, key)
    mask = None
    if attn_mask is not None:
        # An invalid entry does not count as excluded by `attn_mask`: it is filled with True, or with a bias of 0.
        mask = attn_mask.filled(attn_mask.dtype is torch.bool)
        related = intersect(related, attn_mask.validity)
    reachable = _reachable(mask, query, key, is_causal)
    if related is None:
        output = _output_validity(query_validity, reachable, reachable, value)
        return Plan(mask, is_causal, query_validity, query_validity, output)
    allowed = as_bool(related) if reachable is None else as_bool(related) & reachable
    has_key = allowed.any(-1, keepdim=True)
    # Each valid query has a valid key, its own: rows then stay the queries' mask itself, so that nobody compares them.
    own_keys = mask is None and query_validity is not None and is_same_memory(query.validity, key.validity)
    if reachable is None:
        effective = allowed | ~has_key
        rows = query_validity if own_keys else intersect(query_validity, has_key)
    else:
        effective = torch.where(has_key, allowed, reachable)
        reaches = has_key | ~reachable.any(-1, keepdim=True)
        rows = query_validity if own_keys else intersect(query_validity, reaches)
    v = aligned_validity(value)
    own_values = own_keys and is_same_memory(key.validity, value.validity) and v is not None and broadcast_along(v, -1)
    if mask is not None and mask.dtype is not torch.bool:
        effective = torch.where(effective, mask, -torch.inf)
    return Plan(
        attn_mask=effective,
        is_causal=False,
        rows=rows,
        weights=intersect(rows, related),
        output=rows if own_values else _output_validity(rows, reachable, allowed, value),
    )


def _for_every_query_head(x: Dense, heads: int) -> Dense:
    """Keys or values of grouped-query attention, with the validity repeated for every query head."""
    v = aligned_validity(x)
    if v is None or broadcast_along(v, -3):
        return x
    return Dense(x.data, v.repeat_interleave(heads // x.shape[-3], -3))


def _related(query: Dense, key: Dense) -> Tensor | None:
    """Where a query and a key share a valid feature, (…, L or 1, S), provided that the query has a valid feature."""
    if key.validity is None or 0 in key.shape[-2:]:
        return None
    q = aligned_validity(query)
    if q is None or broadcast_along(q, -1):
        key_validity = key.any_valid(-1, keepdim=True)
        related = None if key_validity is None else key_validity.mT
    else:
        related = product_validity(query, transposed(key))
    return None if related is None else related.expand(*related.shape[:-1], key.shape[-2])


def _reachable(mask: Tensor | None, query: Dense, key: Dense, is_causal: bool) -> Tensor | None:
    """The keys that `attn_mask` and `is_causal` alone let a query attend to, bool; None for all."""
    reachable = mask if mask is None or mask.dtype is torch.bool else mask != -torch.inf
    if is_causal:
        causal = query.data.new_ones((query.shape[-2], key.shape[-2]), dtype=torch.bool).tril()
        reachable = causal if reachable is None else reachable & causal
    return reachable


def _output_validity(
    rows: Tensor | None, reachable: Tensor | None, allowed: Tensor | None, value: Dense
) -> Tensor | None:
    """Validity of outputs: the query is valid, and one of its allowed values in that feature (or it may have none)."""
    if value.validity is None or value.shape[-2] == 0:
        return rows
    if allowed is None:
        return intersect(rows, value.any_valid(-2, keepdim=True))
    v = aligned_validity(value)
    assert v is not None
    allowed = allowed.expand(*allowed.shape[:-1], value.shape[-2])
    if broadcast_along(v, -1):
        has_value = (allowed & as_bool(v).mT).any(-1, keepdim=True)
    else:
        has_value = (
            torch.matmul(allowed.to(torch.float32), v.expand(*v.shape[:-2], *value.shape[-2:]).to(torch.float32)) > 0.5
        )
    if reachable is not None:
        has_value = has_value | ~reachable.any(-1, keepdim=True)
    return intersect(rows, has_value)


# ------------------------------------------------------------------------------------------------------ fused attention


@masked_rule(
    aten.scaled_dot_product_attention.default,
    category=ATTENTION,
    dims=ByArgument(
        "enable_gqa",
        Equation("*(hr)qd,*hkd,*hkv,*(hr)qk->*(hr)qv", counts={"is_causal": "qk"}),
        Equation("*qd,*kd,*kv,*qk->*qv", counts={"is_causal": "qk"}),
    ),
)
def scaled_dot_product_attention(
    query: Dense,
    key: Dense,
    value: Dense,
    attn_mask: Dense | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Dense:
    p = plan(query, key, value, attn_mask, is_causal, enable_gqa)
    data = aten.scaled_dot_product_attention(
        _queries(query, key, value),
        key.filled(0),
        value.filled(0),
        p.attn_mask,
        dropout_p,
        p.is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    return Dense(data, p.output)


def _queries(query: Dense, *others: Dense) -> Tensor:
    """The queries, unfilled if each is valid or invalid as a whole and no gradient may flow.

    In forward, the data of an invalid query only reaches that query's own output, which is invalid. But the derivatives
    of keys and values sum over all queries; and where there are no keys, torch gives NaN to all queries if one has it.
    """
    alone = not being_traced(query.data) and not gradients_may_flow(query.data, *(x.data for x in others))
    alone = alone and all(x.shape[-2] for x in others)
    return query.data if alone and has_whole_slices(query, (-1,)) else query.filled(0)


@masked_rule(
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    category=ATTENTION,
    takes_call=True,
    dims=Equation("bhqd,bhkd,bhkv,*qk->bhqv,bhq", counts={"is_causal": "qk"}),
)
def _scaled_dot_product_flash_attention_for_cpu(c: Bound) -> tuple[Dense, Dense]:
    """Without heads, queries or keys, torch's kernel ends the process; here the sums are over nothing."""
    p = plan(c.query, c.key, c.value, c.attn_mask, c.is_causal)
    if 0 in (*c.query.shape[1:3], *c.key.shape[1:3]):
        output = c.query.filled(0) @ c.key.filled(0).mT @ c.value.filled(0)
        logsumexp = output.new_full(c.query.shape[:-1], -torch.inf, dtype=accumulation_dtype(output.dtype))
    else:
        output, logsumexp = _planned(c, p)
    return Dense(output, p.output), Dense(logsumexp, None if p.rows is None else p.rows.squeeze(-1))


def _planned(c: Bound, p: Plan) -> Any:
    """A call of torch's kernel as planned, on tensors filled with 0."""
    mask = _as_bias(p.attn_mask, c.query.dtype)
    filled = {name: c[name].filled(0) for name in ("query", "key", "value")}
    return c.with_(**filled, attn_mask=mask, is_causal=p.is_causal).applied(c.op)


def _as_bias(allowed: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The mask as a bias: unlike scaled_dot_product_attention, these operators do not take bool masks."""
    if allowed is None or allowed.dtype is not torch.bool:
        return allowed
    return torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, -torch.inf)


@masked_rule(
    aten._scaled_dot_product_attention_math.default,
    category=ATTENTION,
    takes_call=True,
    dims=ByArgument(
        "enable_gqa",
        Equation("*(hr)qd,*hKd,*hKv,*(hr)qK,*(hr)qK->*(hr)qv,*(hr)qK", counts={"is_causal": "qK"}),
        Equation("*qd,*Kd,*Kv,*qK,*qK->*qv,*qK", counts={"is_causal": "qK"}),
    ),
)
def _scaled_dot_product_attention_math(c: Bound) -> tuple[Dense, Dense]:
    attn_mask, dropout_mask = c.attn_mask, c.dropout_mask
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = attn_mask.like(attn_mask.data.to(c.query.dtype))
    p = plan(c.query, c.key, c.value, attn_mask, c.is_causal, c.enable_gqa)
    dropout = None if dropout_mask is None else dropout_mask.filled(True)
    output, weights = _planned(c.with_(dropout_mask=dropout), p)
    return Dense(output, p.output), Dense(weights, p.weights)


@masked_rule(
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_fused_attention_overrideable,
    aten._efficient_attention_forward,
    aten._flash_attention_forward,
    category=OPAQUE,
    takes_op=True,
)
def kernels_of_other_devices(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Refused if an operand is partly valid: each of these kernels has its own way to leave out keys.

    scaled_dot_product_attention chooses one of them, and gives it a mask in the form that it takes.
    """
    for record in records_in((*args, *kwargs.values())):
        if not known_all_valid(record):
            raise MaskedSemanticsError(
                f"{packet_name(op)} is one of several kernels, each with its own way of excluding keys, and was called "
                f"with a partly valid tensor of shape {tuple(record.shape)}. Call "
                "torch.nn.functional.scaled_dot_product_attention, which chooses a kernel and excludes invalid keys."
            )
    return run_plain(op, args, kwargs)


@masked_rule(aten._fused_sdp_choice.default, category=QUERY)
def _fused_sdp_choice(*args: Any, **kwargs: Any) -> int:
    """Which kernel torch would choose for the data; no value is read."""
    return aten._fused_sdp_choice(*data_of(args), **{name: data_of(value) for name, value in kwargs.items()})
