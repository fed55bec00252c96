"""Scans: cumsum, cumprod, cummax, cummin, logcumsumexp; and the powers of vander, a scan of repeated elements.

Law: at valid positions torch's result on the slice with its invalid elements removed; valid where the input is.

An invalid step is filled with the identity, which leaves the running value unchanged. The index from cummax is that of
the last element that equals the running maximum. At a valid position it is never a fill: a fill can only equal a
running maximum that is the identity itself, and then the valid element at that position is the last to equal it.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from op_registry.authoring import SCAN, Dense, Equation, Slices, gradients_may_flow, masked_rule, masked_slices, scan
from op_registry.dimensions.sizes import known_in_forward
from op_registry.records.slices import filled_for_exp, identity_of, valid_first_positions

aten = torch.ops.aten

cumsum = scan(aten.cumsum, identity=0)


@masked_rule(aten.cumprod, category=SCAN, dims=Slices("each"), identity=1)
def cumprod(x: Dense, dim: int, *, dtype: torch.dtype | None = None) -> Dense:
    """The running product."""
    if x.data.requires_grad:
        known_in_forward(x.shape[dim:][:1])
    return x.like(aten.cumprod(x.filled(1), dim, dtype=dtype))


@masked_slices(aten.cummax, aten.cummin, category=SCAN, dims=Slices("each", positions=(1,)))
def cummax(op: OpOverload, x: Dense, dim: int) -> tuple[Dense, Dense]:
    """The running maximum (minimum) and the index of its last occurrence."""
    values, index = op(x.filled(identity_of(op, x.dtype)), dim)
    return x.like(values), x.like(index)


@masked_slices(aten.logcumsumexp, aten._logcumsumexp, category=SCAN, dims=Slices("each"))
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


# torch's decomposition writes the powers into memory that it allocates as a plain tensor, which would lose the mask.
@masked_rule(aten.vander, category=SCAN, dims=Equation("n->nN"))
def vander(x: Dense, N: int | None = None, increasing: bool = False) -> Dense:
    """The powers 0 to N - 1 of each element, valid where the element is; its power 0 is 1, which is always valid."""
    columns = x.data.numel() if N is None else N
    if x.ndim != 1 or columns < 1:
        return Dense(aten.vander(x.data, N, increasing))  # no elements, or torch's error
    values = x.filled(1).to(torch.promote_types(x.dtype, torch.int64))
    if values.requires_grad:
        known_in_forward((columns,))
    repeated = values.unsqueeze(1).expand(-1, columns - 1)
    powers = torch.cat([torch.ones_like(values).unsqueeze(1), repeated.cumprod(1)], 1)
    validity = x.full_validity
    if validity is not None:
        validity = torch.cat([torch.ones_like(validity).unsqueeze(1), validity.unsqueeze(1).expand_as(repeated)], 1)
    result = Dense(powers, validity)
    return result if increasing else result.map(lambda t: t.flip(1))
