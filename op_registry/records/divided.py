"""Tensors that processes divide among them (torch's DTensor): the facts that rules need.

Most operators of torch move the parts that they need between processes; this module serves the exceptions.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


def is_divided(tensor: Tensor) -> bool:
    """Whether the tensor is a DTensor. (Importing the type takes long.)"""
    return hasattr(tensor, "placements")


def gather_along(tensor: Tensor, dim: int, index: Tensor) -> Tensor:
    """``tensor.gather(dim, index)``, complete on all processes.

    If the tensor is divided along `dim`, torch returns a pending result, whose placement keeps the shape of the index:
    after a squeeze, torch can no longer complete it.
    """
    return undivided_along(tensor, dim).gather(dim, index)


def undivided_along(tensor: Tensor, dim: int) -> Tensor:
    """The tensor, redistributed so that no process has only a part along `dim` or a part of a sum."""
    return undivided(tensor, lambda placement: divides(placement, [dim % tensor.ndim]) or placement.is_partial())


def divided_by_rows(tensor: Tensor) -> Tensor:
    """The tensor, redistributed so that each process has whole rows (of the first dimension)."""
    return undivided(tensor, lambda placement: not placement.is_shard(0))


def divides(placement: Any, dims: Sequence[int]) -> bool:
    """Whether a placement divides one of the dimensions, into one piece per process or several.

    (torch makes several pieces when it merges dimensions; `is_shard` of that placement returns False.)
    """
    return getattr(placement, "dim", None) in dims


def undivided(tensor: Tensor, where: Callable[[Any], bool] = lambda placement: True) -> Tensor:
    """A tensor, complete on every process; `where` selects by placement the mesh dimensions along which to gather."""
    if not is_divided(tensor):
        return tensor
    divided: Any = tensor
    replicate = importlib.import_module("torch.distributed.tensor").Replicate()
    placements = [replicate if where(placement) else placement for placement in divided.placements]
    return divided.redistribute(placements=placements)  # type: ignore[no-any-return]


def without_empty_parts(tensor: Tensor, dims: Sequence[int]) -> Tensor:
    """The tensor, made complete on every process if one of them has no elements along `dims`.

    The maximum of no elements would raise on that process, and the others would wait for it.
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
