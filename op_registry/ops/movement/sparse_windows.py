"""Padding and windows on sparse storage: positions selected along each dimension, some of them several times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    NotLowered,
    Number,
    Sparse,
    lowers,
    refuse_dense_dims,
    select_along,
    with_coordinates,
    without_block_padding,
    wrap_dim,
)
from op_registry.ops.movement import rules as movement
from op_registry.ops.movement import views

aten = torch.ops.aten


def _padded_by(*rules: Any) -> None:
    """Paddings that repeat elements: along each dimension the index that torch's own kernel has for a line."""
    for rule in rules:
        rule.lowering(Sparse)(_padded)


def _padded(op: OpOverload, x: Any, pad: Sequence[int]) -> Any:
    op(torch.empty(x.shape, device="meta"), pad)  # raises torch's errors
    if op is aten._pad_circular.default and any(width < 0 for width in pad):
        raise NotLowered("what is left goes round, not what there was")
    dims = [x.ndim - 1 - n for n in range(len(pad) // 2)]
    return select_along(x, {d: _line(op, x, d, pad[2 * n : 2 * n + 2]) for n, d in enumerate(dims)})


def _line(op: OpOverload, x: Any, dim: int, pad: Sequence[int]) -> Tensor:
    """Which element of a dimension each of a padded one repeats."""
    size = x.shape[dim]
    before, after = pad
    at = torch.arange(-before, size + after, device=x.device)
    name = op._schema.name
    if "replication" in name:
        return at.clamp(0, size - 1)
    if "circular" in name:
        return at % size
    folded = at.abs()
    return torch.where(folded >= size, 2 * (size - 1) - folded, folded)


_padded_by(movement.reflection_pad, movement.replication_pad, movement._pad_circular)


@movement.constant_pad_nd.lowering(Sparse)
def constant_pad_nd(op: OpOverload, x: Any, pad: Sequence[int], value: Number = 0) -> Any:
    if any(width > 0 for width in pad):
        raise NotLowered("what is padded with is valid, and would have to be stored")
    aten.constant_pad_nd(torch.empty(x.shape, device="meta"), pad, value)  # raises torch's errors
    chosen = {}
    for n in range(len(pad) // 2):
        dim = x.ndim - 1 - n
        if pad[2 * n] or pad[2 * n + 1]:
            chosen[dim] = torch.arange(-pad[2 * n], x.shape[dim] + pad[2 * n + 1], device=x.device)
    return select_along(x, chosen)


@lowers(views.unfold)
def unfold(x: Sparse, dimension: int, size: int, step: int) -> Any:
    """Every window as a line of its own, behind the other dimensions; an element is in several."""
    refuse_dense_dims(x)
    shape = torch.empty(x.shape, device="meta").unfold(dimension, size, step).shape
    at = wrap_dim(dimension, x.ndim)
    flat, places = without_block_padding(x)
    each = -(-size // step)
    source = torch.arange(places[at].shape[0], device=x.device).repeat_interleave(each)
    back = torch.arange(each, device=x.device).repeat(places[at].shape[0])
    window = places[at][source] // step - back
    inside = places[at][source] - window * step
    kept = ((window >= 0) & (window < shape[at]) & (inside < size)).nonzero()[:, 0]
    source = source[kept]
    moved = [window[kept] if d == at else p[source] for d, p in enumerate(places)]
    return with_coordinates(x, [*moved, inside[kept]], flat.take_rows(source), shape)
