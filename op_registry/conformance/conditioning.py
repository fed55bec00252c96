"""Results that depend on the last bit of an operand, such as a softmax of large numbers in bfloat16."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from op_registry.conformance.oracles.call import Expected, NoOracle, Refused
from op_registry.conformance.trial import Trial

NUDGES = 8
# The error that we accept, relative to that of nudged operands: every step of a call rounds, not only its operands.
FURTHER = 4.0


def explained_by_rounding(trial: Trial, position: int, got: Tensor, want: Tensor, mask: Tensor) -> bool:
    """Whether `got` is as near to `want` (where `mask`) as the same result for operands with other last bits."""
    if not (want.is_floating_point() or want.is_complex()) or got.shape != want.shape or got.dtype is not want.dtype:
        return False
    spread = torch.zeros(want.shape, dtype=torch.float64)
    for seed in range(NUDGES):
        nudged = _expected_of_nudged(trial, position, seed)
        if nudged is None or not torch.equal(nudged.mask, mask):
            return False
        spread = torch.maximum(spread, _distance(nudged.data, want))
    return bool(((_distance(got, want) <= FURTHER * spread) | ~mask).all())


def _expected_of_nudged(trial: Trial, position: int, seed: int) -> Expected | None:
    try:
        found = trial.on_other_values(change=functools.partial(_nudged, seed=seed)).expected()[position]
    except (NoOracle, Refused):
        return None
    return found if isinstance(found, Expected) else None


def _nudged(tensor: Tensor, seed: int) -> Tensor:
    """Each element one rounding further up, or down, or as it is."""
    if not tensor.is_floating_point():
        return tensor.detach().clone()
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randint(-1, 2, tensor.shape, generator=generator)
    return (tensor.detach().double() * (1 + torch.finfo(tensor.dtype).eps * direction)).to(tensor.dtype)


def _distance(mine: Tensor, theirs: Tensor) -> Tensor:
    wide = torch.complex128 if theirs.is_complex() else torch.float64
    return (mine.detach().to(wide) - theirs.detach().to(wide)).abs()
