"""A stand-in on the CPU for torch's attention kernels that read the bounds of sequences on a GPU.

It computes sequence by sequence what the kernels compute, and refuses what they refuse: bounds that are not int32, a
number of rows that a length exceeds, rows that are not contiguous.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from op_registry.ops.attention import by_bounds

Bounds = tuple[Tensor, Tensor, int, int]
called: list[str] = []


def _sequences(queries: Tensor, keys: Tensor, most_queries: int, most_keys: int) -> Iterator[tuple[slice, slice]]:
    for bounds, most in ((queries, most_queries), (keys, most_keys)):
        assert bounds.dtype is torch.int32
        assert bounds.is_contiguous()
        assert int(bounds.diff().max()) <= most
    parts = (zip(b.tolist(), b.tolist()[1:], strict=False) for b in (queries, keys))
    yield from ((slice(*q), slice(*k)) for q, k in zip(*parts, strict=True))


def _weights(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores = q @ k.mT * scale
    return (scores.masked_fill(~torch.ones_like(scores).tril().bool(), -torch.inf) if causal else scores).softmax(-1)


def _attend(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, causal: bool, scale: float | None) -> Tensor:
    """(n, H, E); 0 for queries without keys."""
    scale, output = q.shape[-1] ** -0.5 if scale is None else scale, torch.zeros_like(q)
    for queries, keys in _sequences(*bounds):
        of_query, of_key, of_value = (t.transpose(0, 1) for t in (q[queries], k[keys], v[keys]))
        output[queries] = (_weights(of_query, of_key, causal, scale) @ of_value).transpose(0, 1)
    return output


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    found = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for queries, keys in _sequences(*bounds):
        g, of_query, of_key, of_value = (t.transpose(0, 1) for t in (grad[queries], q[queries], k[keys], v[keys]))
        weights = _weights(of_query, of_key, causal, scale)
        of_weights = g @ of_value.mT
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale
        parts = of_scores @ of_key, of_scores.mT @ of_query, weights.mT @ g
        for total, part, rows in zip(found, parts, (queries, keys, keys), strict=True):
            total[rows] = part.transpose(0, 1)
    return found


def _flash(
    q: Tensor, k: Tensor, v: Tensor, qb: Tensor, kb: Tensor, mq: int, mk: int, p: float, causal: bool, debug: bool,
    *, scale: float | None = None, **rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert all(t.stride(-1) == 1 for t in (q, k, v))
    called.append("flash")
    output = _attend(q, k, v, (qb, kb, mq, mk), causal, scale).contiguous()
    state = torch.zeros(2, dtype=torch.uint64)
    return output, q.new_zeros(q.shape[1], q.shape[0], dtype=torch.float32), state, q.new_empty(0), q.new_empty(0)


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, qb: Tensor, kb: Tensor, mq: int, mk: int,
    p: float, causal: bool, state: Tensor, unused: Tensor, *, scale: float | None = None, **rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _gradients(grad, q, k, v, (qb, kb, mq, mk), causal, scale)


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: None, qb: Tensor, kb: Tensor, mq: int, mk: int, p: float, kind: int,
    compute_log_sumexp: bool = False, *, scale: float | None = None, **rest: Any,
) -> tuple[Any, ...]:  # fmt: skip
    assert all(len(t) == 1 and t.stride(-1) == 1 for t in (q, k, v))
    assert compute_log_sumexp
    called.append("efficient")
    output = _attend(q[0], k[0], v[0], (qb, kb, mq, mk), bool(kind), scale)[None].contiguous()
    state = torch.zeros((), dtype=torch.int64)
    return output, q.new_zeros(len(qb) - 1, q.shape[2], mq, dtype=torch.float32), state, state.clone(), mq, mk


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: None, out: Tensor, qb: Tensor, kb: Tensor, mq: int, mk: int,
    lse: Tensor, p: float, seed: Tensor, offset: Tensor, kind: int, bias_requires_grad: bool, *,
    scale: float | None = None, **rest: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    found = _gradients(grad[0], q[0], k[0], v[0], (qb, kb, mq, mk), bool(kind), scale)
    return (*(t[None] for t in found), None)


KERNELS = {
    "_flash_attention_forward": _flash,
    "_flash_attention_backward": _flash_backward,
    "_efficient_attention_forward": _efficient,
    "_efficient_attention_backward": _efficient_backward,
}


@contextlib.contextmanager
def kernels_of_sequences(device: str) -> Iterator[list[str]]:
    """The stand-ins on a device, whose tensors the CPU computes; the names of those that are called."""
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in KERNELS.items():
        library.impl(name, kernel, "CPU")
    called.clear()
    with (
        mock.patch.object(by_bounds, "DEVICES", [device]),
        mock.patch.object(by_bounds, "_capability", return_value=(8, 0)),
        mock.patch.object(torch.backends.cuda, "is_flash_attention_available", return_value=True),
    ):
        try:
            yield called
        finally:
            library._destroy()
