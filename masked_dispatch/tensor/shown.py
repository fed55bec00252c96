"""What is shown of a record of any size: the few elements that are printed, and the valid share of each block."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from op_registry.extents.factors import conjunction, factors_of
from op_registry.records.dense import Dense
from op_registry.records.validity import as_bool, as_int8
from op_registry.sparse.coordinates import Coordinates, ravel, unravel
from op_registry.sparse.permuted import AnyRecord, Permuted
from op_registry.sparse.record import Sparse

# The most elements whose validity or coordinates we read at once.
CHUNK = 2**20


@dataclass(frozen=True)
class ValidityBlocks:
    """The valid elements of each block, on the CPU.

    row_dims         number of dimensions that run down
    shape            the matrix's shape, in elements
    rows_per_block, columns_per_block  size of a block; the last blocks may be smaller
    valid, elements  number of valid and of all elements in each block, int64 of shape (blocks down, blocks across)
    there            number of elements in each block at positions that are there
    """

    row_dims: int
    shape: tuple[int, int]
    rows_per_block: int
    columns_per_block: int
    valid: Tensor
    elements: Tensor
    there: Tensor

    @property
    def shares(self) -> Tensor:
        """The valid share of what is there in each block, float64 between 0 and 1."""
        return self.valid.double() / self.there.clamp(min=1)

    @property
    def padding(self) -> Tensor:
        """The share of each block that is not there."""
        return 1 - self.there.double() / self.elements


def extent_as_mask(record: AnyRecord) -> Dense | None:
    """A record of this shape that is valid where positions are there; None if all are."""
    there = conjunction(factors_of(record))
    return None if there is None else Dense(there.expand(record.shape), there)


def validity_blocks(
    record: AnyRecord, most_rows: int, most_columns: int, row_dims: int | None = None
) -> ValidityBlocks:
    """Count the valid elements in blocks, at most `most_rows` blocks down and `most_columns` across.

    row_dims  number of leading dimensions that run down; None: the number that makes the matrix most nearly square
    """
    split = squarest(record.shape) if row_dims is None else row_dims
    rows, columns = math.prod(record.shape[:split]), math.prod(record.shape[split:])
    per_row, per_column = max(1, -(-rows // most_rows)), max(1, -(-columns // most_columns))
    down, across = -(-rows // per_row), -(-columns // per_column)
    heights = torch.full((down,), per_row).clamp_(max=rows - torch.arange(down) * per_row)
    widths = torch.full((across,), per_column).clamp_(max=columns - torch.arange(across) * per_column)
    elements = heights[:, None] * widths

    def valid_in(record: AnyRecord) -> Tensor:
        if not isinstance(record, Dense):
            return _valid_of_sparse(record, split, per_row, per_column, (down, across)).cpu()
        validity = record.validity
        if validity is None:
            return elements.clone()
        if columns > 1 and math.prod(validity.shape[split:]) == 1:  # all columns share one validity
            rows_alone = validity.expand(*record.shape[:split], *validity.shape[split:])
            return _valid_of_dense(rows_alone, split, per_row, 1, (down, 1)).cpu() * widths
        return _valid_of_dense(validity.expand(record.shape), split, per_row, per_column, (down, across)).cpu()

    extent = extent_as_mask(record)
    there = elements if extent is None else valid_in(extent)
    return ValidityBlocks(split, (rows, columns), per_row, per_column, valid_in(record), elements, there)


def squarest(shape: torch.Size) -> int:
    """The number of leading dimensions that makes the matrix most nearly square; 1 for 2 dimensions, 0 for 1."""
    if math.prod(shape) == 0:
        return max(len(shape) - 1, 0)
    return min(
        range(len(shape) - 1, 0, -1),
        key=lambda n: abs(math.log(math.prod(shape[:n])) - math.log(math.prod(shape[n:]))),
        default=0,
    )


def _valid_of_dense(validity: Tensor, split: int, per_row: int, per_column: int, blocks: tuple[int, int]) -> Tensor:
    validity = as_int8(validity)
    rows, columns = math.prod(validity.shape[:split]), math.prod(validity.shape[split:])
    valid = torch.zeros(blocks, dtype=torch.int64, device=validity.device)
    block_of_column = torch.arange(columns, device=validity.device) // per_column
    for start in range(0, rows, step := max(1, min(per_row, CHUNK // max(columns, 1)))):
        for first, last in _cut_at_blocks(start, min(start + step, rows), per_row):
            index = torch.arange(first, last, device=validity.device)
            part = validity[unravel(index, validity.shape[:split])] if split else validity
            counts = part.reshape(last - first, columns).sum(0, dtype=torch.int64)
            valid[first // per_row].index_add_(0, block_of_column, counts)
    return valid


def _cut_at_blocks(start: int, stop: int, per_row: int) -> Iterator[tuple[int, int]]:
    """The part of each block among the rows from `start` to `stop`."""
    while start < stop:
        end = min(stop, (start // per_row + 1) * per_row)
        yield start, end
        start = end


def _valid_of_sparse(
    record: Sparse | Permuted, split: int, per_row: int, per_column: int, blocks: tuple[int, int]
) -> Tensor:
    total = torch.zeros(math.prod(blocks), dtype=torch.int64, device=record.device)
    columns = math.prod(record.shape[split:])
    for position in valid_positions_of_sparse(record):
        row, column = position // columns, position % columns
        total += ((row // per_row) * blocks[1] + column // per_column).bincount(minlength=len(total))
    return total.reshape(blocks)


def valid_positions_of_sparse(record: Sparse | Permuted) -> Iterator[Tensor]:
    """The positions of the valid elements in the flattened tensor, in stored order, by chunks."""
    base = record.base if isinstance(record, Permuted) else record
    groups = record.groups if isinstance(record, Permuted) else tuple((d,) for d in range(base.ndim))
    flat, stored, sizes = base.flat, base.pattern.coordinates(), base.shape
    dense = flat.shape[1:]
    validity = flat.full_validity
    inside = [torch.arange(size, device=base.device) for size in dense]
    step = max(1, CHUNK // max(math.prod(dense), 1))
    for start in range(0, flat.shape[0], step):
        part = [c[start : start + step].reshape(-1, *(1 for _ in dense)) for c in stored]
        part += [c.reshape(-1, *(1 for _ in dense[d + 1 :])) for d, c in enumerate(inside)]
        visible = [ravel([part[d] for d in group], [sizes[d] for d in group]) for group in groups]
        position = ravel(visible, record.shape).expand(len(part[0]), *dense)
        yield position[as_int8(validity[start : start + step]).bool()] if validity is not None else position.reshape(-1)


# ------------------------------------------------------------------------------------------------------------- elements

# Dtypes that torch can only store and view, without other kernels.
BITS = {getattr(torch, name) for name in ("bits1x8", "bits2x4", "bits4x2", "bits8", "bits16", "float4_e2m1fn_x2")}
FEW_BITS = {getattr(torch, f"{sign}int{n}") for sign in ("", "u") for n in range(1, 8)}
WITHOUT_KERNELS = BITS | FEW_BITS
BYTES = {1: torch.uint8, 2: torch.uint16}


def edges(record: AnyRecord, edgeitems: int) -> Dense:
    """The first and last `edgeitems` elements of each dimension that has more than twice as many, on the CPU."""
    picks = [edge_indices(size, edgeitems, record.device) for size in record.shape]
    along = [pick.reshape([-1 if d == dim else 1 for d in range(len(picks))]) for dim, pick in enumerate(picks)]
    return on_cpu(elements_at(record, along))


def all_elements(record: AnyRecord) -> Dense:
    """Every element, on the CPU."""
    return edges(record, max(record.shape, default=0))


def first_and_last_valid(record: AnyRecord, count: int) -> tuple[Coordinates, Dense]:
    """The coordinates of the first and last `count` valid elements in row-major order, and the elements, on the CPU."""
    if isinstance(record, Dense):
        validity = record.validity
        validity = torch.ones_like(record.data, dtype=torch.bool) if validity is None else validity.expand(record.shape)
        found = {*_valid_from(validity, count, True), *_valid_from(validity, count, False)}
        along = torch.tensor(sorted(found), dtype=torch.int64, device=record.device).reshape(-1, record.ndim)
        coordinates = along.unbind(1)
    else:
        first = last = torch.empty(0, dtype=torch.int64, device=record.device)
        for positions in valid_positions_of_sparse(record):
            first, last = (torch.cat([kept, positions]) for kept in (first, last))
            first = first.topk(min(count, len(first)), largest=False).values
            last = last.topk(min(count, len(last))).values
        coordinates = unravel(torch.cat([first, last]).unique(), record.shape)
    return tuple(c.cpu() for c in coordinates), on_cpu(elements_at(record, coordinates))


def _valid_from(validity: Tensor, count: int, start: bool) -> list[tuple[int, ...]]:
    """The coordinates of the first `count` valid elements, or of the last ones."""
    if validity.ndim == 0:
        return [()] if bool(validity) else []
    found: list[tuple[int, ...]] = []
    for row in _rows_with_valid(validity, start):
        found += [(row, *inner) for inner in _valid_from(validity[row], count - len(found), start)]
        if len(found) == count:
            break
    return found


def _rows_with_valid(validity: Tensor, start: bool) -> Iterator[int]:
    """The indices of dimension 0 with a valid element, from the start or from the end."""
    rows = validity.shape[0]
    for dim, stride in enumerate(validity.stride()):
        validity = validity.narrow(dim, 0, 1) if stride == 0 and validity.shape[dim] else validity
    if validity.shape[0] != rows:  # all rows share one validity
        if bool(as_bool(validity).any()):
            yield from range(rows) if start else reversed(range(rows))
        return
    step = max(1, CHUNK // max(math.prod(validity.shape[1:]), 1))
    starts = range(0, rows, step)
    for first in starts if start else reversed(starts):
        part = as_bool(validity[first : first + step])
        indices = (part.flatten(1).any(1) if part.ndim > 1 else part).nonzero()[:, 0].tolist()
        yield from (first + i for i in (indices if start else reversed(indices)))


def edge_indices(size: int, edgeitems: int, device: torch.device) -> Tensor:
    """The indices of the first and last `edgeitems` of `size` elements; all indices, if these cover them."""
    if size <= 2 * edgeitems:
        return torch.arange(size, device=device)
    first = torch.arange(edgeitems, device=device)
    return torch.cat([first, torch.arange(size - edgeitems, size, device=device)])


def elements_at(record: AnyRecord, coordinates: Sequence[Tensor]) -> Dense:
    """The elements at coordinates that broadcast to each other, one for each dimension of the record."""
    if isinstance(record, Permuted):
        return elements_at(record.base, base_coordinates(record, coordinates))
    if isinstance(record, Dense):
        data = with_kernels(record.data)
        return Dense(data, record.full_validity).map(lambda t: t[tuple(coordinates)] if coordinates else t)
    listed = torch.broadcast_tensors(*coordinates)
    readable = Sparse(Dense(with_kernels(record.values.data), record.values.validity), record.pattern)
    return readable.at(tuple(c.reshape(-1) for c in listed)).map(lambda t: t.reshape(listed[0].shape))


def base_coordinates(record: Permuted, coordinates: Sequence[Tensor]) -> Coordinates:
    """Convert visible coordinates to coordinates in the base."""
    sizes = record.base.shape
    found: dict[int, Tensor] = {}
    for group, index in zip(record.groups, coordinates, strict=True):
        found.update(zip(group, unravel(index, [sizes[d] for d in group]), strict=True))
    return tuple(found[d] for d in range(record.base.ndim))


def with_kernels(data: Tensor) -> Tensor:
    """The data; dtypes that torch can only store become integers of the same size."""
    return data.view(BYTES[data.dtype.itemsize]) if data.dtype in WITHOUT_KERNELS else data


def on_cpu(x: Dense) -> Dense:
    """A copy from which we can read single values: on the CPU, without lazy conjugation or negation."""
    return Dense(x.data.resolve_conj().resolve_neg().cpu(), None if x.validity is None else x.validity.cpu())
