"""Scans: cumsum, cumprod, cummax, cummin, logcumsumexp.

Law: at valid positions torch's result on the slice with its invalid elements removed; valid where the input is.

An invalid step is filled with the identity, which leaves the running value unchanged. The index from cummax is that of
the last element that equals the running maximum. At a valid position it is never a fill: a fill can only equal a
running maximum that is the identity itself, and then the valid element at that position is the last to equal it.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from op_registry.authoring import (
    SCAN,
    Dense,
    Slices,
    filled_for_exp,
    gradients_may_flow,
    identity_of,
    masked_slices,
    scan,
    valid_first_positions,
)

aten = torch.ops.aten

cumsum = scan(aten.cumsum, identity=0)
cumprod = scan(aten.cumprod, identity=1)


@masked_slices(aten.cummax, aten.cummin, category=SCAN, slices=Slices("each", positions=(1,)))
def cummax(op: OpOverload, x: Dense, dim: int) -> tuple[Dense, Dense]:
    """The running maximum (minimum) and the index of its last occurrence."""
    values, index = op(x.filled(identity_of(op, x.dtype)), dim)
    return x.like(values), x.like(index)


@masked_slices(aten.logcumsumexp, aten._logcumsumexp, category=SCAN, slices=Slices("each"))
def logcumsumexp(op: OpOverload, x: Dense, dim: int) -> Dense:
    """Invalid steps contribute exp(-inf) = 0.

    Before the first valid step the running value would be -inf, for which torch's derivative is NaN. So where gradients
    may flow, the valid elements are moved to the front and the results back.
    """
    if not (x.dtype.is_floating_point or x.dtype.is_complex):
        return x.like(op(x.filled(0), dim))  # torch refuses integers
    filled = filled_for_exp(x, dim)
    if x.ndim == 0 or not gradients_may_flow(x.data):
        return x.like(op(filled, dim))
    validity = x.full_validity
    assert validity is not None
    positions = valid_first_positions(validity, dim)
    front = torch.zeros_like(filled).scatter(dim, positions, filled)
    return x.like(op(front, dim).gather(dim, positions))
