"""Coordinates (one index per dimension) and positions (one index into the flattened tensor), and the way between.

Also what only needs these: reading and writing a dense tensor at coordinates, merging values with equal indices, and
checks of index tensors from outside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from op_registry.records.arguments import SIGNED, accumulation_dtype, on_signed_bits
from op_registry.records.tracing import being_traced, under_transform
from op_registry.records.validity import as_bool

Coordinates = tuple[Tensor, ...]


def ravel(coordinates: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """The position of each element in the flattened tensor of `sizes`, from its coordinates: int64.

    Raises ValueError for a tensor with more elements than int64 can number (torch makes none).
    """
    if all(type(size) is int for size in sizes) and math.prod(sizes) > 2**63:
        raise ValueError(
            f"a tensor of sizes {tuple(sizes)} has {math.prod(sizes):,} elements, more than int64 can number: "
            "leave some dimensions dense, or split it"
        )
    position = coordinates[0].to(torch.int64)
    for index, size in zip(coordinates[1:], sizes[1:], strict=True):
        position = position * size + index
    return position


def unravel(positions: Tensor, sizes: Sequence[int]) -> Coordinates:
    """The coordinates of each position in a tensor of `sizes`; the inverse of :func:`ravel`."""
    coordinates = []
    for size in reversed(sizes[1:]):
        coordinates.append(positions % size)
        positions = positions // size
    return (positions, *reversed(coordinates)) if sizes else ()


def unique_keys(keys: Tensor, bound: int) -> tuple[Tensor, Tensor]:
    """The distinct keys in ascending order, and the index of each key among them; keys are in [0, bound)."""
    if being_traced(keys) or bound > 8 * keys.shape[0] + 2**16:
        unique, inverse = keys.unique(return_inverse=True)
        return unique, inverse
    occurs = torch.zeros(bound, dtype=torch.int8, device=keys.device).index_fill_(0, keys, 1)
    return as_bool(occurs).nonzero()[:, 0], (occurs.cumsum(0, dtype=torch.int64) - 1)[keys]


# ----------------------------------------------------------------------------------- reading and writing at coordinates
# Advanced indexing copies one element at a time. index_select and index_copy are 2-6 times faster, and apply to rows
# selected by a single index and to elements selected by their position in contiguous memory (`python -m benchmarks
# adagrad`).


def gather(data: Tensor, coordinates: Coordinates) -> Tensor:
    """`data[coordinates]`: n elements or rows selected by their first dimensions, (n, *rest)."""
    if data.dtype in SIGNED:
        return gather(data.view(SIGNED[data.dtype]), coordinates).view(data.dtype)
    if len(coordinates) == 1:
        return data.index_select(0, coordinates[0])
    if not data.is_contiguous() or 0 in data.shape:
        return data[coordinates]
    sizes, rest = data.shape[: len(coordinates)], data.shape[len(coordinates) :]
    return data.view(-1, *rest).index_select(0, ravel(coordinates, sizes))


def wide(rows: Tensor, like: Tensor | None = None) -> Tensor:
    """The same memory as 16-byte elements if contiguous rows divide into them, else `rows` itself.

    index_copy moves a row element by element, so that complex128 takes half the time of float32.
    like  the tensor that decides, if not `rows`
    """
    asked = rows if like is None else like
    per_element = 16 // asked.dtype.itemsize
    divides = asked.ndim > 1 and asked.shape[-1] % per_element == 0 and asked.storage_offset() % per_element == 0
    return rows.view(torch.complex128) if divides and asked.device.type == "cpu" and not being_traced(asked) else rows


def scatter_(target: Tensor, coordinates: Coordinates, values: Tensor) -> Tensor:
    """`target[coordinates] = values` in place, for distinct coordinates; returns the target."""
    if target.dtype in SIGNED:
        scatter_(target.view(SIGNED[target.dtype]), coordinates, values.view(SIGNED[target.dtype]))
        return target
    recorded = torch.is_grad_enabled() and (target.requires_grad or values.requires_grad)
    if recorded or not target.is_contiguous() or 0 in target.shape:
        return target.index_put_(coordinates, values)
    if len(coordinates) == 1:
        wide(target).index_copy_(0, coordinates[0], wide(values.contiguous(), like=target))
        return target
    sizes, rest = target.shape[: len(coordinates)], target.shape[len(coordinates) :]
    target.view(-1, *rest).index_copy_(0, ravel(coordinates, sizes), values)
    return target


# --------------------------------------------------------------------------------------------------- merging duplicates
# One sort, then a segmented sum. `unique` and `index_add` would make two passes over the values in random order.
# torch's embedding_bag makes one, vectorized (`python -m benchmarks adagrad`).

aten = torch.ops.aten

# torch's CPU builds with fbgemm radix-sort integers from this length on, faster than a comparison sort of half as many.
RADIX_SORT_LENGTH = 2**15
HAS_RADIX_SORT = "fbgemm" in torch.backends.quantized.supported_engines


def merge_duplicates(index: Tensor, values: Tensor, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The distinct indices in ascending order, int64 (m,), and the sum of the values of each, (m, *rest).

    index    (n,) int64 or int32, in any order
    values   (n, *rest), of any dtype; bool values are combined by logical or
    counted  bool (n,): which indices take part; None: all
    """
    ordered, order = sort_indices(index, counted)
    unique, counts = ordered.unique_consecutive(return_counts=True)
    shape = (unique.shape[0], *values.shape[1:])
    sum_dtype = accumulation_dtype(values.dtype)
    recorded = (torch.is_grad_enabled() and values.requires_grad) or under_transform()
    if recorded or sum_dtype not in (torch.float32, torch.float64) or 0 in shape:
        segment = torch.repeat_interleave(counts, output_size=order.shape[0])
        total = sums_of_rows(shape[0], segment, values[order])
    else:
        # embedding_bag reads the rows in the order of `order`, so that the values need not be permuted first.
        rows = values.reshape(values.shape[0], -1).to(sum_dtype)
        total = aten._embedding_bag_forward_only(rows, order, counts.cumsum(0) - counts)[0].reshape(shape)
    return unique.to(torch.int64), total.to(values.dtype)


def sums_of_rows(number: int, index: Tensor, values: Tensor) -> Tensor:
    """(number, *rest): the sum of the rows of `values` (n, *rest) at each index; bool values are combined by or."""

    def added(rows: Tensor) -> Tensor:
        dtype = torch.int64 if rows.dtype is torch.bool else accumulation_dtype(rows.dtype)
        total = rows.new_zeros((number, *rows.shape[1:]), dtype=dtype)
        return total.index_add(0, index, rows.to(dtype)).to(rows.dtype)

    return on_signed_bits(added, values)


def sort_indices(index: Tensor, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The counted indices in ascending order, and where each of them was; a stable sort."""
    number = index.shape[0] if counted is None else int(counted.sum())
    if counted is not None or (index.device.type == "cpu" and number):
        known = index if counted is None else torch.where(counted, index, 0)
        bound = int(known.amax()) + 1 if known.shape[0] else 0  # indices that do not count sort behind all others
        index = known if counted is None else torch.where(counted, index, bound)
        if index.device.type == "cpu" and bound < 2**31:
            index = index.to(torch.int32)
            if HAS_RADIX_SORT and RADIX_SORT_LENGTH // 4 <= index.shape[0] < RADIX_SORT_LENGTH:
                index = torch.cat([index, index.new_full((RADIX_SORT_LENGTH - index.shape[0],), bound)])
    ordered, order = index.sort(stable=True)
    return ordered[:number], order[:number]


# ---------------------------------------------------------------------------------------------- checks of index tensors
# Do index tensors from a file or from torch.sparse describe a valid pattern? Each function describes the first problem
# in a few words, or returns None. All computation on patterns relies on these checks; kernels read and write out of
# bounds if they do not hold.

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
