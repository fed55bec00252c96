"""A layout of somebody's own: one piece, the positions of the stored elements in the flattened tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import masked_dispatch as md
from op_registry.authoring import Coordinates, Layout, ravel, register_layout, unravel


@dataclass(frozen=True)
class Numbered(Layout):
    """One piece: the positions of the stored elements in the flattened tensor, ascending."""

    name = "numbered"

    def coordinates(self, pieces: tuple[Tensor, ...], sizes: Sequence[int]) -> Coordinates:
        return unravel(pieces[0], sizes)

    def pieces_of(
        self, coordinates: Coordinates, sizes: Sequence[int], dtype: torch.dtype = torch.int64
    ) -> tuple[Tensor, ...]:
        return (ravel(coordinates, sizes).to(dtype),)


NUMBERED = register_layout(Numbered())


def some(shape: tuple[int, ...], valid: float = 0.4) -> md.MaskedTensor:
    generator = torch.Generator().manual_seed(3)
    data = torch.randn(shape, generator=generator, dtype=torch.float64)
    return md.masked_tensor(data, torch.rand(shape, generator=generator) < valid)
