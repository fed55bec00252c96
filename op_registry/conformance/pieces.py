"""Units of work of the full tier, all of about one size: a crash loses little, and slices take about as long."""

from __future__ import annotations

import math

from op_registry.conformance.samples import operator_named

# The most samples in a piece, each of which is tried under every mask and law.
MOST_SAMPLES = 50


def pieces_of(name: str) -> list[str]:
    """An operator's name in each dtype (``add@int64``), with each part of its samples if they are many (``@0/3``)."""
    operator = operator_named(name)
    dtypes = [f"{name}@{str(dtype)[6:]}" for dtype in sorted(operator.dtypes, key=str)]
    if not dtypes:
        return [name]
    parts = math.ceil(len(operator.samples(operator.preferred_dtype)) / MOST_SAMPLES)
    return [f"{dtype}@{k}/{parts}" for dtype in dtypes for k in range(parts)] if parts > 1 else dtypes
