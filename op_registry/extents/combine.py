"""Factors that meet in one result: what two operands know of the same dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from op_registry.errors import MaskedSemanticsError
from op_registry.extents.factors import (
    SAMPLES,
    SCATTERED,
    Along,
    Factor,
    Positions,
    computed,
    is_prefix,
    numbers_positions,
    where_all,
    with_size,
)
from op_registry.records.tracing import assert_when_run, being_traced, recording, values_of
from op_registry.records.validity import as_int8, intersect


def combined(operands: Sequence[Sequence[Factor]], name: str) -> tuple[Factor, ...]:
    """The factors of a result, of those that each operand has there; `name` is the operator's, for the error.

    Raises MaskedSemanticsError if samples lie at different places along a dimension.
    """
    check_layouts(operands, name)
    found: list[Factor] = []
    for factor in [f for factors in operands for f in factors]:
        same = next((n for n, f in enumerate(found) if f.depends == factor.depends), None)
        if same is None:
            found.append(factor)
        else:
            found[same] = both(found[same], factor)
    return tuple(found)


def both(a: Factor, b: Factor) -> Factor:
    """Where both factors are, which depend on the same dimensions."""
    if a.along == b.along and a.said is b.said:
        return a
    along = tuple(met(x, y) for x, y in zip(a.along, b.along, strict=True))
    assert a.said is not None
    assert b.said is not None
    return Factor(along, computed(intersect, a.said, b.said))


def laid_out(parts: Sequence[tuple[Tensor | None, int]], dim: int, like: Tensor) -> Tensor:
    """Booleans end to end along `dim`, each with the size of its part (None: ones)."""
    ones = like.new_ones([1] * like.ndim)
    tensors = [ones if there is None else there for there, _ in parts]
    shape = torch.broadcast_shapes(*[with_size(t.shape, dim, 1) for t in tensors])
    return torch.cat(
        [as_int8(t).expand(with_size(shape, dim, size)) for t, (_, size) in zip(tensors, parts, strict=True)], dim
    )


def met(a: Along, b: Along) -> Along:
    """What is known where both factors are."""
    if a == b:
        return a
    if isinstance(a, Positions) and isinstance(b, Positions):
        return Positions(a.contiguous and b.contiguous, a.from_start and b.from_start)
    return SCATTERED if numbers_positions(a) or numbers_positions(b) else SAMPLES


def check_layouts(operands: Sequence[Sequence[Factor]], name: str) -> None:
    """Refuse operands whose samples lie at different places along a dimension."""
    if sum(map(bool, operands)) < 2:
        return
    for dim in range(len(next(factors for factors in operands if factors)[0].along)):
        met = [[f for f in factors if numbers_positions(f.along[dim])] for factors in operands]
        met = [factors for factors in met if factors]
        if len(met) < 2 or all(is_prefix(f.along[dim]) for factors in met for f in factors):
            continue
        first, *others = [where_all(factors) for factors in met]
        for other in others:
            if first is not other:
                _check_same(first, other, dim, name)


def _check_same(a: Tensor, b: Tensor, dim: int, name: str) -> None:
    text = (
        f"{name}: two operands have samples at different places along dimension {dim} (one is padded in front, the "
        "other behind, say), so that their positions do not belong together. Move the samples of both to the front "
        f"first, masked_dispatch.align(x, {dim}); or drop what is known of the padding, x.without_extent()."
    )
    if being_traced(a) or being_traced(b) or recording():
        assert_when_run(a == b, text)
    elif a.shape != b.shape or not bool(values_of(a == b).all()):
        raise MaskedSemanticsError(text)
