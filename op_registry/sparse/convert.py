"""Dense → sparse in two passes, count and write, a chunk at a time: no index of the whole tensor is ever made.

The order of a layout is the order of some two-dimensional listing: of rows (COO, CSR), of columns (CSC), of rows or
columns of blocks (BSR, BSC); batches are more of them. A listing is cut into chunks that stay in a core's cache. What
there is to write is known from the first pass, and each chunk writes its part of the result.

In a chunk, the positions of what is stored are found in one of three ways, which differ in speed alone:

    few stored    eight mask bytes at a time, then byte by byte where a word is not zero
    many          without a branch: every element writes its position to the slot that the running count gives it,
                  elements that are not stored to a slot that nobody reads. A random mask is mispredicted every other
                  time by a loop that asks, which costs more than all of the rest
    otherwise     torch's nonzero: on other devices, and where several threads share the work
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

# Elements of a chunk: its mask, positions and values fit a second-level cache. Where little is stored, and where
# columns are turned, larger ones cost less for each element; no more of them than a small part of the whole.
CHUNK = 2**17
LARGE_CHUNK = 2**19


def _larger(numel: int) -> int:
    return max(CHUNK, min(LARGE_CHUNK, numel // 64))


# Below so many elements a conversion is a few calls of torch, whose fixed costs are all that there is.
SMALL = 2**16
# Bits to be moved, whatever they mean: not every kernel knows every dtype.
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def in_chunks(x: Dense) -> bool:
    """Whether a record is to be converted chunk by chunk: large, and of values that are there to be looked at."""
    unknown = being_traced(x.data) or x.device.type == "meta"
    return not unknown and x.data.numel() > SMALL


def blocked(t: Tensor, dims: int, block: tuple[int, int]) -> Tensor:
    """A tensor with `dims` sparse dimensions as grid of blocks: (*batch, grid rows, grid columns, rows, columns, …)."""
    rows, columns = block
    batch, (high, wide), dense = t.shape[: dims - 2], t.shape[dims - 2 : dims], t.shape[dims:]
    split = t.reshape(*batch, high // rows, rows, wide // columns, columns, *dense)
    return split.transpose(dims - 1, dims)


def positions(mask: Tensor, stored: int) -> Tensor:
    """Where a mask (n,) of int8 is 1, which is in `stored` places: int64, ascending."""
    n = mask.shape[0]
    if mask.device.type != "cpu" or torch.get_num_threads() > 2:
        return as_bool(mask).nonzero()[:, 0]
    if stored * 16 > n:
        slot = mask.cumsum(0, dtype=torch.int64).mul_(mask)
        return slot.new_empty(stored + 1).scatter_(0, slot, torch.arange(n))[1:]
    if n % 8 or mask.storage_offset() % 8:
        return as_bool(mask).nonzero()[:, 0]
    word = mask.view(torch.int64).nonzero()[:, 0]
    inside = as_bool(mask.view(-1, 8).index_select(0, word)).view(-1).nonzero()[:, 0]
    return word.index_select(0, inside >> 3).mul_(8).add_(inside & 7)


def ones_by_row(mask: Tensor) -> Tensor:
    """How many elements of each row of a mask (rows, across) of int8 are 1: int64.

    Eight bytes at a time, no byte of a sum more than 255: three times as fast as to widen each.
    """
    words = mask.shape[1] // 8
    group = next((g for g in (128, 64, 32, 16) if words % g == 0), 0)
    if not group or mask.shape[1] % 8 or not mask.is_contiguous() or mask.storage_offset() % 8 or not words:
        return mask.sum(1, dtype=torch.int32).to(torch.int64)
    sums = mask.view(torch.int64).view(mask.shape[0], -1, group).sum(2)
    return sums.view(torch.uint8).sum(1, dtype=torch.int64)


def _starts(counts: Tensor) -> Tensor:
    """Where each line begins among all that is stored, and the end: one more than there are lines."""
    return torch.cat([counts.new_zeros(1, dtype=torch.int64), counts.reshape(-1).cumsum(0, dtype=torch.int64)])


def _spans(length: int, step: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, step):
        yield start, min(start + step, length)


def by_row(some: Tensor, carried: Sequence[Tensor]) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
    """Where rows begin and the places in them, of a mask (*…, rows, columns), and what is stored of the tensors."""
    starts, _, plain, taken = row_by_row(some, carried, with_lines=False)
    return (starts, plain), taken


def coordinates_by_row(some: Tensor, carried: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Coordinates (dimensions, stored) of what a mask stores, and what is stored of the tensors."""
    _, indices, _, taken = row_by_row(some, carried, with_lines=True)
    assert indices is not None
    if some.ndim > 2:
        for d, size in reversed(list(enumerate(some.shape[1:-1], 1))):
            torch.remainder(indices[0], size, out=indices[d])
            indices[0] //= size
    return indices, taken


def row_by_row(
    some: Tensor, carried: Sequence[Tensor], with_lines: bool
) -> tuple[Tensor, Tensor | None, Tensor, list[Tensor]]:
    """What is stored, in the order of rows, of a mask (*…, across) and of tensors that go on behind its dimensions.

    Where each line starts; if asked, indices (dimensions, stored) of which the first row is the number of the line;
    the places in the lines, which are the last row of that; and what is stored of the tensors.
    """
    ndim, across = max(some.ndim, 1), some.shape[-1]
    mask = some.reshape(math.prod(some.shape[:-1]), across)
    carried = [t.reshape(*mask.shape, *t.shape[some.ndim :]) for t in carried]
    starts = _starts(ones_by_row(mask))
    stored = int(starts[-1])
    indices = starts.new_empty((ndim, stored)) if with_lines else None
    plain = starts.new_empty(stored) if indices is None else indices[-1]
    taken = [t.new_empty((stored, *t.shape[2:])) for t in carried]
    few = stored * 16 <= mask.numel()
    chunk = _larger(mask.numel()) if few else CHUNK
    height, width = max(1, chunk // max(across, 1)), min(max(across, 1), chunk)
    column_of = None if few else torch.arange(width, device=mask.device).repeat(height)
    bounds = [*starts[:-1:height].tolist(), stored]
    for (top, bottom), (start, end) in zip(_spans(mask.shape[0], height), itertools.pairwise(bounds), strict=True):
        at = start
        for left, right in _spans(across, width):
            if start == end:
                continue
            piece = mask[top:bottom, left:right].reshape(-1)
            to = end if across <= width else at + int(piece.sum(dtype=torch.int64))
            found = positions(piece, to - at)
            if column_of is None:
                torch.remainder(found, right - left, out=plain[at:to])
            else:
                torch.index_select(column_of, 0, found, out=plain[at:to])
            if left:
                plain[at:to] += left
            if indices is not None and ndim > 1:
                torch.div(found, right - left, rounding_mode="floor", out=indices[0, at:to])
                indices[0, at:to] += top
            _take(carried, taken, found, (slice(top, bottom), slice(left, right)), slice(at, to))
            at = to
    return starts, indices, plain, taken


def _take(
    carried: Sequence[Tensor], taken: Sequence[Tensor], found: Tensor, tile: tuple[slice, slice], where: slice
) -> None:
    for t, out in zip(carried, taken, strict=True):
        torch.index_select(t[tile].reshape(-1, *t.shape[2:]), 0, found, out=out[where])


def by_column(some: Tensor, carried: Sequence[Tensor]) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
    """The same by columns: where they begin, and the places in them."""
    rows, columns = some.shape[-2:]
    if some.numel() == 0:
        starts = _starts(some.new_zeros((*some.shape[:-2], columns), dtype=torch.int64))
        return (starts, starts.new_empty(0)), [t.new_empty((0, *t.shape[some.ndim :])) for t in carried]
    mask = some.reshape(-1, rows, columns)
    carried = [t.reshape(*mask.shape, *t.shape[some.ndim :]) for t in carried]
    stored = int(ones_by_row(mask.reshape(-1, columns)).sum())
    if stored * 64 <= mask.numel():
        return _columns_of_few(mask, carried)
    return _column_by_column(mask, carried, stored)


def _columns_of_few(mask: Tensor, carried: Sequence[Tensor]) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
    """Found row by row, then sorted by column: what little there is costs less than to turn the whole mask."""
    matrices, rows, columns = mask.shape
    _, indices, _, taken = row_by_row(mask, carried, with_lines=True)
    assert indices is not None
    row, column = indices[0], indices[-1]
    if matrices > 1:
        batch = row // rows
        row, column = row - batch * rows, column + batch * columns
    counts = torch.zeros(matrices * columns, dtype=torch.int64, device=mask.device)
    counts.scatter_add_(0, column, torch.ones_like(column))
    order = sorted_order(column, matrices * columns)
    return (_starts(counts), row.index_select(0, order)), [t.index_select(0, order) for t in taken]


def sorted_order(keys: Tensor, bound: int) -> Tensor:
    """The stable order of keys in [0, bound), sorted in the narrowest dtype that holds them."""
    if being_traced(keys):
        return keys.sort(stable=True).indices  # not to bind sizes
    narrow = next((t for t in (torch.int16, torch.int32) if bound <= torch.iinfo(t).max), torch.int64)
    return keys.to(narrow).sort(stable=True).indices


def _column_by_column(
    mask: Tensor, carried: Sequence[Tensor], stored: int
) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
    """Tiles of some columns (or of some small matrices) are turned, and then listed as rows are."""
    matrices, rows, columns = mask.shape
    chunk = _larger(mask.numel())
    several = max(1, chunk // (rows * columns))
    wide, high = min(columns, max(1, chunk // rows)), min(rows, chunk)
    step = max(1, CHUNK // 2 // high)  # lines of a tile that are listed at a time: the tile takes memory, too
    row_of = torch.arange(high, device=mask.device).repeat(step)
    counts = row_of.new_zeros((matrices, columns))
    plain = row_of.new_empty(stored)
    taken = [t.new_empty((stored, *t.shape[3:])) for t in carried]
    at = 0
    for (first, last), (left, right) in itertools.product(_spans(matrices, several), _spans(columns, wide)):
        for top, bottom in _spans(rows, high):
            tile, each = (slice(first, last), slice(top, bottom), slice(left, right)), bottom - top
            piece, sources = turned(mask[tile]), [turned(t[tile]) for t in carried]
            by_line = ones_by_row(piece.view(-1, each))
            counts[first:last, left:right] += by_line.view(last - first, right - left)
            bounds = _starts(by_line).add_(at).tolist()
            for begin, end in _spans(by_line.shape[0], step):
                at, to = bounds[begin], bounds[end]
                if at == to:
                    continue
                part = slice(begin * each, end * each)
                found = positions(piece[part], to - at)
                torch.index_select(row_of, 0, found, out=plain[at:to])
                if top:
                    plain[at:to] += top
                for source, out in zip(sources, taken, strict=True):
                    torch.index_select(source[part], 0, found, out=out[at:to])
            at = bounds[-1]
    return (_starts(counts), plain), taken


def turned(tile: Tensor) -> Tensor:
    """The elements of matrices (n, rows, columns, …), column by column."""
    if tile.shape[0] == 1 and tile.ndim == 3:
        # Copied twice, since torch turns a matrix quickly only if all of it lies together.
        return tile[0].contiguous().t().reshape(-1)
    return tile.transpose(1, 2).reshape(-1, *tile.shape[3:])


def by_block(
    some: Tensor, carried: Sequence[Tensor], block: tuple[int, int], by_column: bool
) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
    """Blocks with anything in them, whole: by rows of blocks, or by columns of blocks."""
    sizes, (rows, columns) = tuple(some.shape), block
    high, wide = sizes[-2] // rows, sizes[-1] // columns
    matrices = math.prod(sizes[:-2])
    grid = some.new_zeros((matrices, high, wide))
    if some.numel():
        grid = some.reshape(-1, rows, sizes[-1]).amax(1).reshape(matrices, high, wide, columns).amax(-1)
    listed = grid.transpose(1, 2) if by_column else grid
    starts = _starts(listed.sum(2, dtype=torch.int32))
    stored, lines, each = int(starts[-1]), starts.shape[0] - 1, high if by_column else wide
    flat = as_bool(listed.reshape(-1)).nonzero()[:, 0]
    plain = flat % max(each, 1)
    taken = [t.new_empty((stored, rows, columns, *t.shape[some.ndim :])) for t in carried]
    if not stored:
        return (starts, plain), taken
    grids = []
    for t in carried:
        split = t.reshape(matrices, high, rows, wide, columns, *t.shape[some.ndim :])
        split = split.transpose(2, 3)  # matrix, grid row, grid column, row, column
        grids.append(split.transpose(1, 2) if by_column else split)
    # A step takes some lines of one matrix, or some whole matrices.
    per_matrix = lines // matrices
    height = min(per_matrix, max(1, CHUNK // (each * rows * columns)))
    several = max(1, CHUNK // (per_matrix * each * rows * columns)) if height == per_matrix else 1
    bounds = starts.tolist()
    for (first, last), (top, bottom) in itertools.product(_spans(matrices, several), _spans(per_matrix, height)):
        begin, stop = first * per_matrix + top, (last - 1) * per_matrix + bottom
        at, to = bounds[begin], bounds[stop]
        for t, out in zip(grids, taken, strict=True):
            tile = t[first:last, top:bottom]
            if to - at == (stop - begin) * each:
                out[at:to].view(tile.shape).copy_(tile)
            elif to > at:
                torch.index_select(tile.reshape(-1, *tile.shape[3:]), 0, flat[at:to] - begin * each, out=out[at:to])
    return (starts, plain), taken
