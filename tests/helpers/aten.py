"""The overloads of aten, as objects."""

from __future__ import annotations

from collections.abc import Iterator

from torch._ops import OpOverload

from masked_dispatch.torch_internals import aten_names, overload_named


def aten_overloads() -> Iterator[OpOverload]:
    """Every aten overload that takes a tensor."""
    return map(overload_named, aten_names())
