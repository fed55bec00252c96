"""pandas' functions for missing values, on tensors of any shape: an invalid element is a missing one.

Each function takes masked tensors in any storage (and plain ones, in which nothing is missing), works along the given
dimension, and is differentiable; results are stored densely. pandas is only needed for labels that are neither integers
nor bool.

filling.py          fill, move and drop missing elements; what all functions share
groups.py           statistics of groups, and labels as numbers of groups
rolling_windows.py  statistics of rolling windows
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from masked_dispatch.api.known_words import WORDS, function_elsewhere
from masked_dispatch.missing.filling import bfill, dropna, ffill, fillna, interpolate, nan_to_invalid, shift
from masked_dispatch.missing.groups import GroupBy, groupby
from masked_dispatch.missing.rolling_windows import Rolling, rolling
from masked_dispatch.tensor.messages import no_such_name

__all__ = [
    "GroupBy",
    "Rolling",
    "bfill",
    "dropna",
    "ffill",
    "fillna",
    "groupby",
    "interpolate",
    "nan_to_invalid",
    "rolling",
    "shift",
]


def __dir__() -> list[str]:
    return [*__all__]


if not TYPE_CHECKING:  # a type checker would take any name for an attribute

    def __getattr__(name: str) -> NoReturn:
        no_such_name(__name__, name, WORDS, __all__, function_elsewhere(name))
