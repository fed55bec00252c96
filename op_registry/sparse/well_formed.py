"""Index tensors that come from elsewhere (a file, torch.sparse): whether they are what a pattern says that they are.

Each function returns what is wrong in a few words, or None. Everything that computes with a pattern takes this for
granted, and kernels read and write out of bounds where it does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

INDEX_DTYPES = (torch.int32, torch.int64)


def problem_of_coo(indices: Tensor, sizes: Sequence[int]) -> str | None:
    """Of COO indices, (sparse dimensions, n), of dimensions of these sizes."""
    if indices.shape[1] == 0 or indices.shape[0] == 0:
        return None
    # Each dimension by itself: over several at a time torch has no vectorised extremes.
    extremes = torch.stack([bound for places in indices for bound in places.aminmax()]).reshape(-1, 2).tolist()
    for dim, ((low, high), size) in enumerate(zip(extremes, sizes, strict=True)):
        if low < 0 or high >= size:
            return f"indices of dimension {dim} run from {low} to {high}, and it has {size} places"
    return None


def problem_of_compressed(
    by_column: bool,
    matrix: tuple[int, int],
    pieces: tuple[Tensor, Tensor],
    values: int,
    block: tuple[int, int] | None = None,
    batch: tuple[int, ...] = (),
) -> str | None:
    """Of compressed and plain indices, (*batch, lines + 1) and (*batch, n), for so many `values` in all."""
    names = ("ccol_indices", "row_indices") if by_column else ("crow_indices", "col_indices")
    compressed, plain = pieces
    for name, piece in zip(names, pieces, strict=True):
        if piece.dtype not in INDEX_DTYPES:
            return f"{name} are of dtype {piece.dtype}, not int64 or int32"
    blocks = block or (1, 1)
    if any(b < 1 or n % b for n, b in zip(matrix, blocks, strict=True)):
        return f"blocks of {blocks} do not divide a matrix of {matrix}"
    grid = (matrix[0] // blocks[0], matrix[1] // blocks[1])
    lines, across = (grid[1], grid[0]) if by_column else grid
    if compressed.shape[-1] != lines + 1:
        return f"{names[0]} have {compressed.shape[-1]} entries for each matrix, and {lines} lines need {lines + 1}"
    if tuple(plain.shape[:-1]) != batch or tuple(compressed.shape[:-1]) != batch:
        return f"{names[0]} of shape {tuple(compressed.shape)} and {names[1]} of shape {tuple(plain.shape)} do not fit"
    if values != math.prod(plain.shape):
        return f"there are {values} values for {math.prod(plain.shape)} {names[1]}"
    if 0 in compressed.shape:
        return None
    each = plain.shape[-1]
    # Compared with one another, not subtracted, which might overflow; all that is asked is asked in one go.
    descends = compressed[..., 1:] < compressed[..., :-1]
    first, last = compressed[..., 0], compressed[..., -1]
    places = plain if plain.numel() else plain.new_zeros(1)
    facts = [first.amin(), first.amax(), last.amin(), last.amax(), places.amin(), places.amax(), descends.any()]
    first_low, first_high, last_low, last_high, low, high, falls = torch.stack(
        [f.to(torch.int64) for f in facts]
    ).tolist()
    if first_low or first_high:
        return f"{names[0]} begin with {first_high or first_low}, not with 0"
    if last_low != each or last_high != each:
        return f"{names[0]} end with {last_high if last_high != each else last_low}, and {each} {names[1]} are there"
    if falls:
        at = tuple(descends.nonzero()[0].tolist())
        steps = int(compressed[at]), int(compressed[(*at[:-1], at[-1] + 1)])
        return f"{names[0]} descend from {steps[0]} to {steps[1]}; they count the elements from line to line"
    if plain.numel() and (low < 0 or high >= across):
        return f"{names[1]} run from {low} to {high}, and there are {across} places"
    return None


def lines_ascend(compressed: Tensor, plain: Tensor) -> bool:
    """Whether the places in each line ascend; of indices that are within bounds."""
    if plain.shape[0] < 2:
        return True
    descends = plain[1:] <= plain[:-1]
    starts = compressed[1:-1].to(torch.int64) - 1
    # The first of a line may be less than the last of the line before.
    inside = starts[(starts >= 0) & (starts < descends.shape[0])]
    return not bool(descends.index_fill(0, inside, False).any())


def ascend(coordinates: Sequence[Tensor]) -> bool:
    """Whether each element stands behind the one before, the first dimension counting most."""
    ascends = torch.zeros((), dtype=torch.bool, device=coordinates[0].device)
    for places in coordinates[::-1]:
        before, after = places[:-1], places[1:]
        ascends = (after > before) | ((after == before) & ascends)
    return bool(ascends.all())
