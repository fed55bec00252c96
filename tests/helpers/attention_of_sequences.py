"""A small attention module's operands, and which of its functions ran."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import masked_dispatch as md
from masked_dispatch.interop import outside_dispatch
from masked_dispatch.interop.outside_dispatch import lines_of_torch
from masked_dispatch.replacements import serving_instead

BATCH, QUERIES, KEYS, WIDTH, HEADS = 3, 5, 7, 8, 2


def tokens(time: int, mask: Tensor | None, seed: int = 0) -> md.MaskedTensor:
    """Tokens with NaN where they are invalid."""
    data = torch.randn(BATCH, time, WIDTH, generator=torch.Generator().manual_seed(seed))
    return md.as_masked_tensor(data if mask is None else torch.where(mask, data, math.nan), mask)


def padding(time: int, *lengths: int) -> Tensor:
    return (torch.arange(time) < torch.tensor(lengths)[:, None])[..., None]


X = tokens(QUERIES, padding(QUERIES, 5, 3, 1))


def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of the two ran, in order."""
    seen: list[str] = []

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            return function(*args, **kwargs)

        return call

    operator = torch.ops.torch_nn_functional.multi_head_attention.default
    monkeypatch.setattr(outside_dispatch, "OPERATOR", noting("operator", operator))
    served = serving_instead(
        "torch.nn.functional.multi_head_attention_forward",
        noting("lines", lines_of_torch),
        outside_dispatch.multi_head_attention_forward,
        outside_dispatch.has_masked_operand,
    )
    monkeypatch.setattr(F, "multi_head_attention_forward", served)
    return seen
