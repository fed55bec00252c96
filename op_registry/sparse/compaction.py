"""Dense → sparse in two passes, count and write, a chunk at a time: no index tensor of the dense size is allocated.

The order of a layout is that of some two-dimensional listing: of rows (COO, CSR), of columns (CSC), of rows or columns
of blocks (BSR, BSC); batches add more rows or columns. A listing is cut into chunks that stay in a core's cache. The
first pass gives the size of the result, and each chunk writes its part of it.

The positions of the stored elements of a chunk are found in one of three ways, which differ in speed only:

    few stored    eight mask bytes at a time, then byte by byte in words that are not zero
    many stored   without branches: each element writes its position to the slot given by the running count, elements
                  that are not stored to a slot that is discarded. A loop with a branch would mispredict every other
                  element of a random mask, which costs more than everything else
    otherwise     torch's nonzero: on other devices, and with several threads

Functions take an int8 mask, (*batch, rows, columns), and `carried` tensors, whose leading dimensions are the mask's.
They return the index tensors of what the mask selects, and the elements of the carried tensors there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from op_registry.records.dense import Dense
from op_registry.records.tracing import being_traced
from op_registry.records.validity import as_bool

# Elements of a chunk: its mask, positions and values fit a second-level cache. If little is stored, and for
# column-major order, larger chunks cost less per element, up to a small fraction of the tensor.
CHUNK = 2**17
LARGE_CHUNK = 2**19


def _large_chunk(numel: int) -> int:
    return max(CHUNK, min(LARGE_CHUNK, numel // 64))


# Smaller tensors are converted by a few torch calls, whose fixed costs dominate.
SMALL = 2**16
# Integer dtypes by width in bytes, as which elements are moved: not every kernel supports every dtype.
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def in_chunks(x: Dense) -> bool:
    """Whether to convert a record chunk by chunk: it is large, and its values can be read."""
    unknown = being_traced(x.data) or x.device.type == "meta"
    return not unknown and x.data.numel() > SMALL


def to_block_grid(t: Tensor, dims: int, block: tuple[int, int]) -> Tensor:
    """A tensor with `dims` sparse dimensions as a grid of blocks, (*batch, grid rows, grid columns, *block, *dense)."""
    rows, columns = block
    batch, (height, width), dense = t.shape[: dims - 2], t.shape[dims - 2 : dims], t.shape[dims:]
    split = t.reshape(*batch, height // rows, rows, width // columns, columns, *dense)
    return split.transpose(dims - 1, dims)


def positions(mask: Tensor, stored: int) -> Tensor:
    """The positions of the ones of an int8 mask (n,), `stored` of them: int64, ascending."""
    n = mask.shape[0]
    if mask.device.type != "cpu" or torch.get_num_threads() > 2:
        return as_bool(mask).nonzero()[:, 0]
    if stored * 16 > n:
        slot = mask.cumsum(0, dtype=torch.int64).mul_(mask)
        return slot.new_empty(stored + 1).scatter_(0, slot, torch.arange(n))[1:]
    if n % 8 or mask.storage_offset() % 8:
        return as_bool(mask).nonzero()[:, 0]
    word = mask.view(torch.int64).nonzero()[:, 0]
    byte = as_bool(mask.view(-1, 8).index_select(0, word)).view(-1).nonzero()[:, 0]
    return word.index_select(0, byte >> 3).mul_(8).add_(byte & 7)


def ones_by_row(mask: Tensor) -> Tensor:
    """The number of ones in each row of an int8 mask (rows, columns): int64.

    Adds eight bytes at a time, in groups that cannot exceed 255 per byte: three times as fast as widening each byte.
    """
    words = mask.shape[1] // 8
    group = next((g for g in (128, 64, 32, 16) if words % g == 0), 0)
    if not group or mask.shape[1] % 8 or not mask.is_contiguous() or mask.storage_offset() % 8 or not words:
        return mask.sum(1, dtype=torch.int32).to(torch.int64)
    sums = mask.view(torch.int64).view(mask.shape[0], -1, group).sum(2)
    return sums.view(torch.uint8).sum(1, dtype=torch.int64)


def _starts(counts: Tensor) -> Tensor:
    """Where each row starts among all stored elements, followed by their number, from the counts of the rows."""
    return torch.cat([counts.new_zeros(1, dtype=torch.int64), counts.reshape(-1).cumsum(0, dtype=torch.int64)])


def _spans(length: int, step: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, step):
        yield start, min(start + step, length)


# ------------------------------------------------------------------------------------------------------- row by row


def by_row(mask: Tensor, carried: Sequence[Tensor]) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
    """Where rows start and the columns in them (CSR), and the carried elements."""
    starts, _, columns, gathered = row_by_row(mask, carried, with_rows=False)
    return (starts, columns), gathered


def coordinates_by_row(mask: Tensor, carried: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Coordinates (dimensions, stored) in row-major order (COO), and the carried elements."""
    _, indices, _, gathered = row_by_row(mask, carried, with_rows=True)
    assert indices is not None
    if mask.ndim > 2:
        for d, size in reversed(list(enumerate(mask.shape[1:-1], 1))):
            torch.remainder(indices[0], size, out=indices[d])
            indices[0] //= size
    return indices, gathered


def row_by_row(
    mask: Tensor, carried: Sequence[Tensor], with_rows: bool
) -> tuple[Tensor, Tensor | None, Tensor, list[Tensor]]:
    """The selected elements in row-major order.

    starts    where each row starts among them, (rows + 1,)
    indices   if `with_rows`, (dimensions, stored): the flattened row number first, the column last; else None
    columns   the last of those, (stored,)
    gathered  the elements of each carried tensor
    """
    ndim, width = max(mask.ndim, 1), mask.shape[-1]
    matrix = mask.reshape(math.prod(mask.shape[:-1]), width)
    carried = [t.reshape(*matrix.shape, *t.shape[mask.ndim :]) for t in carried]
    starts = _starts(ones_by_row(matrix))
    stored = int(starts[-1])
    indices = starts.new_empty((ndim, stored)) if with_rows else None
    columns = starts.new_empty(stored) if indices is None else indices[-1]
    gathered = [t.new_empty((stored, *t.shape[2:])) for t in carried]
    few = stored * 16 <= matrix.numel()
    chunk = _large_chunk(matrix.numel()) if few else CHUNK
    chunk_rows, chunk_columns = max(1, chunk // max(width, 1)), min(max(width, 1), chunk)
    column_of = None if few else torch.arange(chunk_columns, device=mask.device).repeat(chunk_rows)
    bounds = [*starts[:-1:chunk_rows].tolist(), stored]
    spans = zip(_spans(matrix.shape[0], chunk_rows), itertools.pairwise(bounds), strict=True)
    for (top, bottom), (start, end) in spans:
        begin = start
        for left, right in _spans(width, chunk_columns):
            if start == end:
                continue
            tile = matrix[top:bottom, left:right].reshape(-1)
            stop = end if width <= chunk_columns else begin + int(tile.sum(dtype=torch.int64))
            selected = positions(tile, stop - begin)
            if column_of is None:
                torch.remainder(selected, right - left, out=columns[begin:stop])
            else:
                torch.index_select(column_of, 0, selected, out=columns[begin:stop])
            if left:
                columns[begin:stop] += left
            if indices is not None and ndim > 1:
                torch.div(selected, right - left, rounding_mode="floor", out=indices[0, begin:stop])
                indices[0, begin:stop] += top
            for t, out in zip(carried, gathered, strict=True):
                flat = t[top:bottom, left:right].reshape(-1, *t.shape[2:])
                torch.index_select(flat, 0, selected, out=out[begin:stop])
            begin = stop
    return starts, indices, columns, gathered


# ------------------------------------------------------------------------------------------------- column by column


def by_column(mask: Tensor, carried: Sequence[Tensor]) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
    """Where columns start and the rows in them (CSC), and the carried elements."""
    rows, columns = mask.shape[-2:]
    if mask.numel() == 0:
        starts = _starts(mask.new_zeros((*mask.shape[:-2], columns), dtype=torch.int64))
        return (starts, starts.new_empty(0)), [t.new_empty((0, *t.shape[mask.ndim :])) for t in carried]
    matrices = mask.reshape(-1, rows, columns)
    carried = [t.reshape(*matrices.shape, *t.shape[mask.ndim :]) for t in carried]
    stored = int(ones_by_row(matrices.reshape(-1, columns)).sum())
    if stored * 64 <= matrices.numel():
        return _few_by_column(matrices, carried)
    return _column_by_column(matrices, carried, stored)


def _few_by_column(mask: Tensor, carried: Sequence[Tensor]) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
    """Collected row by row, then sorted by column: for few elements, cheaper than transposing the mask."""
    matrices, rows, columns = mask.shape
    _, indices, _, gathered = row_by_row(mask, carried, with_rows=True)
    assert indices is not None
    row, column = indices[0], indices[-1]
    if matrices > 1:
        batch = row // rows
        row, column = row - batch * rows, column + batch * columns
    counts = torch.zeros(matrices * columns, dtype=torch.int64, device=mask.device)
    counts.scatter_add_(0, column, torch.ones_like(column))
    order = sorted_order(column, matrices * columns)
    return (_starts(counts), row.index_select(0, order)), [t.index_select(0, order) for t in gathered]


def sorted_order(keys: Tensor, bound: int) -> Tensor:
    """The permutation that stably sorts keys in [0, bound); sorts in the narrowest dtype that holds them."""
    if being_traced(keys):
        return keys.sort(stable=True).indices  # choosing a dtype would guard on sizes
    narrow = next((t for t in (torch.int16, torch.int32) if bound <= torch.iinfo(t).max), torch.int64)
    return keys.to(narrow).sort(stable=True).indices


def _column_by_column(
    mask: Tensor, carried: Sequence[Tensor], stored: int
) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
    """Transposes tiles of some columns (or of some small matrices), and lists them as rows."""
    matrices, rows, columns = mask.shape
    chunk = _large_chunk(mask.numel())
    tile_matrices = max(1, chunk // (rows * columns))
    tile_columns, tile_rows = min(columns, max(1, chunk // rows)), min(rows, chunk)
    step = max(1, CHUNK // 2 // tile_rows)  # columns of a tile listed at a time: the tile needs cache, too
    row_of = torch.arange(tile_rows, device=mask.device).repeat(step)
    counts = row_of.new_zeros((matrices, columns))
    row_indices = row_of.new_empty(stored)
    gathered = [t.new_empty((stored, *t.shape[3:])) for t in carried]
    begin = 0
    for (first, last), (left, right) in itertools.product(
        _spans(matrices, tile_matrices), _spans(columns, tile_columns)
    ):
        for top, bottom in _spans(rows, tile_rows):
            tile, height = (slice(first, last), slice(top, bottom), slice(left, right)), bottom - top
            tile_mask, sources = in_column_order(mask[tile]), [in_column_order(t[tile]) for t in carried]
            by_line = ones_by_row(tile_mask.view(-1, height))
            counts[first:last, left:right] += by_line.view(last - first, right - left)
            bounds = _starts(by_line).add_(begin).tolist()
            for first_line, end_line in _spans(by_line.shape[0], step):
                begin, stop = bounds[first_line], bounds[end_line]
                if begin == stop:
                    continue
                part = slice(first_line * height, end_line * height)
                selected = positions(tile_mask[part], stop - begin)
                torch.index_select(row_of, 0, selected, out=row_indices[begin:stop])
                if top:
                    row_indices[begin:stop] += top
                for source, out in zip(sources, gathered, strict=True):
                    torch.index_select(source[part], 0, selected, out=out[begin:stop])
            begin = bounds[-1]
    return (_starts(counts), row_indices), gathered


def in_column_order(tile: Tensor) -> Tensor:
    """The elements of matrices (n, rows, columns, …), column by column."""
    if tile.shape[0] == 1 and tile.ndim == 3:
        # Two copies are faster than one: torch transposes a matrix quickly only if it is contiguous.
        return tile[0].contiguous().t().reshape(-1)
    return tile.transpose(1, 2).reshape(-1, *tile.shape[3:])


# --------------------------------------------------------------------------------------------------------- by blocks


def by_block(
    mask: Tensor, carried: Sequence[Tensor], block: tuple[int, int], by_column: bool
) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
    """Blocks with a selected element, whole: by rows of blocks (BSR), or by columns of blocks (BSC)."""
    sizes, (rows, columns) = tuple(mask.shape), block
    grid_rows, grid_columns = sizes[-2] // rows, sizes[-1] // columns
    matrices = math.prod(sizes[:-2])
    grid = mask.new_zeros((matrices, grid_rows, grid_columns))
    if mask.numel():
        by_grid_row = mask.reshape(-1, rows, sizes[-1]).amax(1)
        grid = by_grid_row.reshape(matrices, grid_rows, grid_columns, columns).amax(-1)
    listed = grid.transpose(1, 2) if by_column else grid
    starts = _starts(listed.sum(2, dtype=torch.int32))
    stored, lines, line_blocks = int(starts[-1]), starts.shape[0] - 1, grid_rows if by_column else grid_columns
    flat = as_bool(listed.reshape(-1)).nonzero()[:, 0]
    plain = flat % max(line_blocks, 1)
    gathered = [t.new_empty((stored, rows, columns, *t.shape[mask.ndim :])) for t in carried]
    if not stored:
        return (starts, plain), gathered
    grids = []
    for t in carried:
        split = t.reshape(matrices, grid_rows, rows, grid_columns, columns, *t.shape[mask.ndim :])
        split = split.transpose(2, 3)  # matrix, grid row, grid column, row, column
        grids.append(split.transpose(1, 2) if by_column else split)
    # A step takes some rows (columns) of blocks of one matrix, or some whole matrices.
    per_matrix = lines // matrices
    step_lines = min(per_matrix, max(1, CHUNK // (line_blocks * rows * columns)))
    whole_matrices = max(1, CHUNK // (per_matrix * line_blocks * rows * columns))
    step_matrices = whole_matrices if step_lines == per_matrix else 1
    bounds = starts.tolist()
    for (first, last), (top, bottom) in itertools.product(
        _spans(matrices, step_matrices), _spans(per_matrix, step_lines)
    ):
        first_line, end_line = first * per_matrix + top, (last - 1) * per_matrix + bottom
        begin, stop = bounds[first_line], bounds[end_line]
        for t, out in zip(grids, gathered, strict=True):
            tile = t[first:last, top:bottom]
            if stop - begin == (end_line - first_line) * line_blocks:
                out[begin:stop].view(tile.shape).copy_(tile)
            elif stop > begin:
                selected = flat[begin:stop] - first_line * line_blocks
                torch.index_select(tile.reshape(-1, *tile.shape[3:]), 0, selected, out=out[begin:stop])
    return (starts, plain), gathered
