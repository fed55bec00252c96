"""The few elements of a record that a person is shown, read without the others, whatever the storage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from op_registry.records.dense import Dense
from op_registry.sparse.coordinates import Coordinates, unravel
from op_registry.sparse.permuted import AnyRecord, Permuted
from op_registry.sparse.record import Sparse

# Dtypes that torch can store and view, and for which it has no other kernels.
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


def edge_indices(size: int, edgeitems: int, device: torch.device) -> Tensor:
    """The indices of the first and last `edgeitems` of `size` elements; of all, if those are no fewer."""
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
    sparse = record.pattern.ndim
    listed = torch.broadcast_tensors(*coordinates[:sparse])
    slot, stored = record.pattern.find(tuple(c.reshape(-1) for c in listed))
    shape = listed[0].shape
    index = (slot.reshape(shape), *coordinates[sparse:])
    flat = Sparse(Dense(with_kernels(record.values.data), record.values.validity), record.pattern)
    return flat.flat_with_sentinel().map(lambda t: t[index]).masked_by(stored.reshape(shape))


def base_coordinates(record: Permuted, coordinates: Sequence[Tensor]) -> Coordinates:
    """The coordinates in the base of the elements at visible coordinates."""
    sizes = record.base.shape
    found: dict[int, Tensor] = {}
    for group, index in zip(record.groups, coordinates, strict=True):
        found.update(zip(group, unravel(index, [sizes[d] for d in group]), strict=True))
    return tuple(found[d] for d in range(record.base.ndim))


def with_kernels(data: Tensor) -> Tensor:
    """The data, as integers of as many bytes where torch can store a dtype but do nothing else with it."""
    return data.view(BYTES[data.dtype.itemsize]) if data.dtype in WITHOUT_KERNELS else data


def on_cpu(x: Dense) -> Dense:
    """Values that can be read one by one: on the CPU, without lazy signs."""
    return Dense(x.data.resolve_conj().resolve_neg().cpu(), None if x.validity is None else x.validity.cpu())
