"""Checks of index tensors from outside (a file, torch.sparse): do they describe a valid sparsity pattern?

Each function describes the first problem in a few words, or returns None. All computation on patterns relies on these
checks; kernels read and write out of bounds if they do not hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

INDEX_DTYPES = (torch.int32, torch.int64)


def problem_of_coo(indices: Tensor, sizes: Sequence[int]) -> str | None:
    """Checks COO indices, (sparse dimensions, n), against the sizes of those dimensions."""
    if indices.shape[1] == 0 or indices.shape[0] == 0:
        return None
    # One dimension at a time: torch's aminmax over several is not vectorized.
    extremes = torch.stack([bound for index in indices for bound in index.aminmax()]).reshape(-1, 2).tolist()
    for dim, ((low, high), size) in enumerate(zip(extremes, sizes, strict=True)):
        if low < 0 or high >= size:
            return f"indices of dimension {dim} run from {low} to {high}, and its size is {size}"
    return None


def problem_of_compressed(
    by_column: bool,
    matrix: tuple[int, int],
    pieces: tuple[Tensor, Tensor],
    values: int,
    block: tuple[int, int] | None = None,
    batch: tuple[int, ...] = (),
) -> str | None:
    """Checks compressed and plain indices, (*batch, rows + 1) and (*batch, n), with `values` values in all."""
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
        kind = f"{'block ' if block else ''}{'columns' if by_column else 'rows'}"
        return f"{names[0]} have {compressed.shape[-1]} entries for each matrix, and {lines} {kind} need {lines + 1}"
    if tuple(plain.shape[:-1]) != batch or tuple(compressed.shape[:-1]) != batch:
        return f"{names[0]} of shape {tuple(compressed.shape)} and {names[1]} of shape {tuple(plain.shape)} do not fit"
    if values != math.prod(plain.shape):
        return f"there are {values} values for {math.prod(plain.shape)} {names[1]}"
    if 0 in compressed.shape:
        return None
    nnz = plain.shape[-1]
    # Neighbours are compared, not subtracted, since a difference might overflow. One transfer fetches all facts.
    descends = compressed[..., 1:] < compressed[..., :-1]
    first, last = compressed[..., 0], compressed[..., -1]
    indices = plain if plain.numel() else plain.new_zeros(1)
    facts = [first.amin(), first.amax(), last.amin(), last.amax(), indices.amin(), indices.amax(), descends.any()]
    first_low, first_high, last_low, last_high, low, high, any_descends = torch.stack(
        [f.to(torch.int64) for f in facts]
    ).tolist()
    if first_low or first_high:
        return f"{names[0]} begin with {first_high or first_low}, not with 0"
    if last_low != nnz or last_high != nnz:
        return f"{names[0]} end with {last_high if last_high != nnz else last_low}, and there are {nnz} {names[1]}"
    if any_descends:
        at = tuple(descends.nonzero()[0].tolist())
        steps = int(compressed[at]), int(compressed[(*at[:-1], at[-1] + 1)])
        return f"{names[0]} descend from {steps[0]} to {steps[1]}; they are running counts and cannot decrease"
    if plain.numel() and (low < 0 or high >= across):
        return f"{names[1]} run from {low} to {high}, and that dimension has size {across}"
    return None


def rows_ascend(compressed: Tensor, plain: Tensor) -> bool:
    """Whether the plain indices of each row (or column) ascend strictly; they are within bounds."""
    if plain.shape[0] < 2:
        return True
    descends = plain[1:] <= plain[:-1]
    starts = compressed[1:-1].to(torch.int64) - 1
    # The first index of a row may be less than the last one of the previous row.
    row_starts = starts[(starts >= 0) & (starts < descends.shape[0])]
    return not bool(descends.index_fill(0, row_starts, False).any())


def ascend(coordinates: Sequence[Tensor]) -> bool:
    """Whether elements are in strictly ascending lexicographic order of their coordinates."""
    ascends = torch.zeros((), dtype=torch.bool, device=coordinates[0].device)
    for index in coordinates[::-1]:
        before, after = index[:-1], index[1:]
        ascends = (after > before) | ((after == before) & ascends)
    return bool(ascends.all())
