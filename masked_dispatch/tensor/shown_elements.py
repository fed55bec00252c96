"""Read the few elements of a record that we print, without the others, from any storage."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from masked_dispatch.tensor.validity_blocks import CHUNK, valid_positions_of_sparse
from op_registry.records.dense import Dense
from op_registry.records.validity import as_bool
from op_registry.sparse.coordinates import Coordinates, unravel
from op_registry.sparse.permuted import AnyRecord, Permuted
from op_registry.sparse.record import Sparse

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
