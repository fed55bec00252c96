"""Pack the entries of a sparse record into one message of bytes, and combine the entries of several ranks.

A message has the positions of the entries, their values, if some values are invalid a bit of validity for each value,
and a bit for each element of the booleans of an extent that is not the mask. An entry is a stored element (with its
dense dimensions) or, in block layouts, a block. Positions take four bytes where the sizes permit, so an element of a
COO matrix of float32 takes eight.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from masked_dispatch.distributed.extents import WITHOUT, Known
from masked_dispatch.distributed.fields import pack, packed_size, unpack
from masked_dispatch.distributed.records import identity_of, on_wire, result_of, validity_of, wire_dtype
from masked_dispatch.distributed.transport import in_bytes
from op_registry.records.dense import Dense
from op_registry.records.validity import as_int8
from op_registry.sparse.convert import from_coordinates, unpadded_elements, without_invalid
from op_registry.sparse.coordinates import ravel, unravel
from op_registry.sparse.layout import Layout, grid_of
from op_registry.sparse.record import Pattern, Sparse

_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


@dataclass(frozen=True)
class Form:
    """The properties that the tensors of all ranks share and that messages leave out."""

    layout: Layout
    sizes: tuple[int, ...]
    block: tuple[int, int] | None
    index_dtype: torch.dtype
    dense_sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.sizes, *self.dense_sizes))

    @property
    def listed_sizes(self) -> tuple[int, ...]:
        """Return the sizes of the sparse dimensions, counted in blocks for block layouts."""
        return self.sizes if self.block is None else grid_of(self.sizes, self.block)

    @property
    def entry_shape(self) -> tuple[int, ...]:
        return (*(self.block or ()), *self.dense_sizes)

    @property
    def key_dtype(self) -> torch.dtype:
        return torch.int32 if math.prod(self.listed_sizes) < 2**31 else torch.int64

    def sizes_in_bytes(self, entries: int, partial: bool, known: Known) -> tuple[int, ...]:
        """Return the bytes of the positions, the values and the validity of this many entries, and of each boolean."""
        values = entries * math.prod(self.entry_shape)
        return (
            entries * self.key_dtype.itemsize,
            values * self.dtype.itemsize,
            packed_size(values, 1) if partial else 0,
            *(packed_size(shape.numel(), 1) for shape in known.shapes(self.shape)),
        )


@dataclass(frozen=True)
class Entries:
    """Entries at distinct positions of the flattened sparse dimensions (or grid of blocks): keys (n,), int64.

    there  the booleans of the extent that travel with them, int8
    """

    keys: Tensor
    values: Dense
    there: Sequence[Tensor] = ()


def form_of(record: Sparse) -> Form:
    pattern = record.pattern
    index_dtype = pattern.pieces[0].dtype
    return Form(pattern.layout, pattern.sizes, pattern.block, index_dtype, record.dense_sizes, record.dtype)


def entries_of(record: Sparse) -> Entries:
    """Return the entries of a record, without those that are fully invalid."""
    stored = without_invalid(record)
    if stored.pattern.block is not None:
        listed = tuple(c.to(torch.int64) for c in stored.pattern.listed_coordinates())
        return Entries(ravel(listed, stored.pattern.listed_sizes()), stored.values)
    flat, coordinates = unpadded_elements(stored)
    return Entries(ravel(coordinates, stored.pattern.sizes), flat)


def record_of_entries(entries: Entries, form: Form, known: Known = WITHOUT) -> Sparse:
    """Build the record that stores these entries, and whose extent is known so."""
    stored = _stored(entries, form)
    return Sparse(stored.values, stored.pattern, known.extent(entries.there))


def _stored(entries: Entries, form: Form) -> Sparse:
    coordinates = unravel(entries.keys, form.listed_sizes)
    if form.block is None and not form.layout.exact:
        return from_coordinates(form.layout, coordinates, entries.values, form.sizes)
    order = form.layout.order_of(coordinates, form.listed_sizes)
    pieces = form.layout.pieces_of(tuple(c[order] for c in coordinates), form.listed_sizes, form.index_dtype)
    return Sparse(entries.values.take_rows(order), Pattern(form.layout, form.sizes, pieces, form.block))


def encoded(entries: Entries, form: Form, partial: bool) -> Tensor:
    """Encode entries as a message, a one-dimensional uint8 tensor."""
    values = entries.values
    parts = [in_bytes(entries.keys.to(form.key_dtype)), in_bytes(values.data.contiguous().view(-1))]
    booleans = [validity_of(values), *entries.there] if partial else entries.there
    return torch.cat([*parts, *(pack(boolean, 1) for boolean in booleans)])


def decoded(message: Tensor, form: Form, entries: int, partial: bool, known: Known) -> Entries:
    """Decode the entries of a message, which may have padding at its end."""
    sizes = form.sizes_in_bytes(entries, partial, known)
    keys, data, validity, *booleans = message[: sum(sizes)].split(sizes)
    shape = (entries, *form.entry_shape)
    # Each part is copied, because its address must be a multiple of the element size.
    values = data.clone().view(form.dtype).view(shape)
    valid = unpack(validity, 1, values.numel()).view(torch.int8).view(shape) if partial else None
    there = [
        unpack(fields, 1, at.numel()).view(torch.int8).view(at)
        for fields, at in zip(booleans, known.shapes(form.shape), strict=True)
    ]
    return Entries(keys.clone().view(form.key_dtype).to(torch.int64), Dense(values, valid), there)


@dataclass(frozen=True)
class Combined:
    """A reduction over ranks, and the number of valid contributions to each value, int32."""

    entries: Entries
    number: Tensor

    def numbers(self, form: Form) -> Sparse:
        """Return the numbers as a record, in the form of the reduction except for its dtype."""
        return record_of_entries(Entries(self.entries.keys, Dense(self.number, self.entries.values.validity)), form)


def combined(parts: Sequence[Entries], op: str, form: Form) -> Combined:
    """Reduce the valid contributions of all ranks, in the order of the ranks; a position is there where one rank's is.

    The loop adds one rank after the other, so every rank computes the same bits on any device.
    """
    keys = torch.cat([part.keys for part in parts]).unique()
    shape = (len(keys), *form.entry_shape)
    dtype, combine = wire_dtype(op, form.dtype), _COMBINE[on_wire(op, form.dtype)]
    total = torch.full(shape, identity_of(op, dtype), dtype=dtype, device=keys.device)
    number = torch.zeros(shape, dtype=torch.int32, device=keys.device)
    for part in parts:
        slots = torch.searchsorted(keys, part.keys)
        added = part.values.filled(identity_of(op, form.dtype)).to(dtype)
        total[slots] = combine(total[slots], added)
        number[slots] += validity_of(part.values).view(added.shape)
    divisor = number.clamp(min=1) if op == "avg" else 1
    values = Dense(result_of(total, op, divisor, form.dtype), as_int8(number > 0))
    there = [
        functools.reduce(torch.maximum, booleans) for booleans in zip(*[part.there for part in parts], strict=True)
    ]
    return Combined(Entries(keys, values, there), number)
