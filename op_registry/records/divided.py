"""Tensors that are divided among processes (torch's DTensor): what a rule has to know of them.

Operators of torch move what they need between processes, with the exceptions that rules meet.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


def is_divided(tensor: Tensor) -> bool:
    """Whether processes have parts of the tensor. (The type takes long to import.)"""
    return hasattr(tensor, "placements")


def gather_along(tensor: Tensor, dim: int, index: Tensor) -> Tensor:
    """``tensor.gather(dim, index)``, complete on all processes.

    Of a tensor that is divided along `dim`, torch's result is pending, in a form that keeps the shape of the index:
    once a dimension was squeezed, it can no longer be completed.
    """
    return undivided_along(tensor, dim).gather(dim, index)


def undivided_along(tensor: Tensor, dim: int) -> Tensor:
    """The tensor, of which no process has a part along `dim`, nor a part of a sum."""
    return undivided(tensor, lambda placement: divides(placement, [dim % tensor.ndim]) or placement.is_partial())


def divided_by_rows(tensor: Tensor) -> Tensor:
    """The tensor, of whose rows (its first dimension) each process has all or nothing."""
    return undivided(tensor, lambda placement: not placement.is_shard(0))


def divides(placement: Any, dims: Sequence[int]) -> bool:
    """Whether a placement divides one of the dimensions, in one piece for each process or in several.

    (Several are what torch makes of merged dimensions; that placement answers `is_shard` with no.)
    """
    return getattr(placement, "dim", None) in dims


def undivided(tensor: Tensor, where: Callable[[Any], bool] = lambda placement: True) -> Tensor:
    """A tensor, complete on every process; given `where`, in the dimensions of the mesh with such a placement."""
    if not is_divided(tensor):
        return tensor
    divided: Any = tensor
    replicate = importlib.import_module("torch.distributed.tensor").Replicate()
    placements = [replicate if where(placement) else placement for placement in divided.placements]
    return divided.redistribute(placements=placements)  # type: ignore[no-any-return]


def without_empty_parts(tensor: Tensor, dims: Sequence[int]) -> Tensor:
    """The tensor, complete on every process if one of them has nothing of it along `dims`.

    The maximum of nothing raises there, and the other processes would wait for that one.
    """
    if not is_divided(tensor):
        return tensor
    divided: Any = tensor
    parts = [
        (tensor.shape[placement.dim] // getattr(placement, "split_factor", 1), ranks)
        for ranks, placement in zip(divided.device_mesh.shape, divided.placements, strict=True)
        if divides(placement, dims)
    ]
    return undivided(tensor) if any(-(-size // ranks) * (ranks - 1) >= size for size, ranks in parts) else tensor
