"""Attention of packed batches in graphs: one operator, which reads the bounds of the sequences from a tensor.

A graph is compiled for batches of any lengths, so it can't contain one call of torch's kernel for each sequence. The
operator splits the rows when it runs. Forward and backward call the same kernels of torch as eager execution, on the
rows of one sequence at a time; forward saves the logsumexp of the scores for backward.

Rows are (n, heads, features). `bounds` holds the first row of each sequence, and the end of the last one, (B + 1,).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

aten = torch.ops.aten

_OPERANDS = "Tensor query, Tensor key, Tensor value"
_OPTIONS = "Tensor query_bounds, Tensor key_bounds, bool is_causal, float? scale"
_library = Library("masked_rows", "DEF")
_library.define(f"attention({_OPERANDS}, {_OPTIONS}) -> (Tensor, Tensor)")
_library.define(
    f"attention_backward(Tensor grad, {_OPERANDS}, Tensor output, Tensor logsumexp, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor)"
)
attention = torch.ops.masked_rows.attention.default
attention_backward = torch.ops.masked_rows.attention_backward.default

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the operator takes such rows: it takes those that torch's fused kernel takes on a CPU.

    False under torch.export, because exported programs must run without this library.
    """
    features = {x.shape[-1] for x in (query, key, value)}
    on_cpu = query.device.type == "cpu" and query.dtype in _DTYPES
    return on_cpu and len(features) == 1 and not torch.compiler.is_exporting()


def _sequences(query_bounds: Tensor, key_bounds: Tensor) -> Iterator[tuple[slice, slice]]:
    """The rows of the queries and of the keys of each sequence that has both."""
    ends = zip(query_bounds.tolist(), key_bounds.tolist(), strict=True)
    first_query, first_key = next(ends)
    for end_query, end_key in ends:
        if end_query > first_query and end_key > first_key:
            yield slice(first_query, end_query), slice(first_key, end_key)
        first_query, first_key = end_query, end_key


def _as_batch(rows: Tensor) -> Tensor:
    """(n, H, E) → (1, H, n, E)"""
    return rows.transpose(0, 1).unsqueeze(0)


def _as_rows(batch: Tensor) -> Tensor:
    """(1, H, n, …) → (n, H, …)"""
    return batch.squeeze(0).transpose(0, 1)


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _empty_results(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    output = query.new_empty((*query.shape[:2], value.shape[2]))
    return output, query.new_empty(query.shape[:2], dtype=_accumulation_dtype(query.dtype))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_bounds: Tensor,
    key_bounds: Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    output, logsumexp = (x.zero_() for x in _empty_results(query, value))
    for q, k in _sequences(query_bounds, key_bounds):
        results = aten._scaled_dot_product_flash_attention_for_cpu(
            _as_batch(query[q]), _as_batch(key[k]), _as_batch(value[k]), 0.0, is_causal, scale=scale
        )
        output[q], logsumexp[q] = map(_as_rows, results)
    return output, logsumexp


def _attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    query_bounds: Tensor,
    key_bounds: Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    of_query, of_key, of_value = (x.new_zeros(x.shape) for x in (query, key, value))
    for q, k in _sequences(query_bounds, key_bounds):
        of_queries, of_keys = (
            [_as_batch(x[rows]) for x in operands] for rows, operands in ((q, (grad, query, output)), (k, (key, value)))
        )
        results = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            of_queries[0],
            of_queries[1],
            *of_keys,
            of_queries[2],
            _as_batch(logsumexp[q].unsqueeze(-1)).squeeze(-1),
            0.0,
            is_causal,
            scale=scale,
        )
        for total, part, rows in zip((of_query, of_key, of_value), results, (q, k, k), strict=True):
            total[rows] = _as_rows(part)
    return of_query, of_key, of_value


def _fake_attention(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return _empty_results(query, value)


def _fake_attention_backward(grad: Tensor, *operands: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in operands[:3])


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.is_causal, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, query_bounds, key_bounds, output, logsumexp = ctx.saved_tensors
    operands = (grad, query, key, value, output, logsumexp, query_bounds, key_bounds)
    return (*attention_backward(*operands, ctx.is_causal, ctx.scale), None, None, None, None)


_library.impl("attention", _attention, "CPU")
_library.impl("attention_backward", _attention_backward, "CPU")
torch.library.register_fake("masked_rows::attention", _fake_attention, lib=_library)
torch.library.register_fake("masked_rows::attention_backward", _fake_attention_backward, lib=_library)
torch.library.register_autograd("masked_rows::attention", _backward, setup_context=_remember, lib=_library)
