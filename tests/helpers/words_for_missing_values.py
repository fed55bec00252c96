"""Each word for missing values, called on a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

import masked_dispatch as md
from masked_dispatch import missing

T, F = True, False
X = md.masked_tensor([[1.0, float("nan"), 3.0], [4.0, 5.0, float("nan")]], [[T, F, T], [T, T, F]])
WORDS: dict[str, Callable[[Any], Tensor]] = {
    "nan_to_invalid": missing.nan_to_invalid,
    "fillna": lambda x: missing.fillna(x, 7.0),
    "fillna masked": lambda x: missing.fillna(x, X * 2),
    "ffill": lambda x: missing.ffill(x, 1),
    "ffill limit": lambda x: missing.ffill(x, 0, limit=1),
    "bfill": lambda x: missing.bfill(x, 0),
    "interpolate": lambda x: missing.interpolate(x, 1),
    "dropna": lambda x: missing.dropna(x, 1),
    "shift": lambda x: missing.shift(x, 1, 1),
    **{
        f"rolling {word}": lambda x, word=word: getattr(missing.rolling(x, 2, 1, min_count=1), word)()
        for word in ("sum", "mean", "min", "max")
    },
    "rolling var": lambda x: missing.rolling(x, 3, 1, center=True, min_count=1).var(0),
    "rolling std": lambda x: missing.rolling(x, 3, 1, min_count=2).std(),
    **{
        f"group {word}": lambda x, word=word: getattr(missing.groupby(x, [1958, -3, 1958], dim=1), word)()
        for word in ("sum", "mean", "min", "max", "median", "first", "last")
    },
    "group var": lambda x: missing.groupby(x, [1958, -3, 1958], dim=1).var(0),
    "group std": lambda x: missing.groupby(x, [1958, 1958, 1958], dim=1).std(),
    "average": lambda x: md.average(x, [1.0, 2.0, 4.0], 1),
    "pad_stack": lambda x: md.pad_stack([x, x[:1, :2]]),
}
