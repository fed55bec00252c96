"""A collective of sparsely stored masked tensors, packed batches included; it densifies nothing."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from masked_dispatch.distributed.calls import Call, Counted, Finish, replace_extent, sizes_do_not_fit
from masked_dispatch.distributed.extents import WITHOUT, Known, statements_of
from masked_dispatch.distributed.messages import in_bytes, pack, packed_size, unpack
from masked_dispatch.distributed.records import identity_of, on_wire, result_of, validity_of, wire_dtype
from masked_dispatch.tensor.masked_tensor import MaskedTensor, with_extent
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor, wrap_sparse
from op_registry.extents.joins import extent_of_rows
from op_registry.records.dense import Dense
from op_registry.records.validity import as_int8
from op_registry.sparse.convert import from_coordinates, unpadded_elements, without_invalid
from op_registry.sparse.coordinates import ravel, unravel
from op_registry.sparse.layout import Layout, grid_of
from op_registry.sparse.record import Pattern, Sparse


def stored_record(tensor: Tensor) -> Sparse:
    """Return the record of a sparsely stored tensor that is not a view; problem_of_sparse refuses views."""
    assert isinstance(tensor, SparseMaskedTensor)
    record = tensor.record
    assert isinstance(record, Sparse)
    return record


class SparseCall(Call):
    """One collective of sparsely stored tensors, whose entries travel."""

    def problem_of(self, sent: Sequence[Tensor], outputs: Sequence[Tensor], pairwise: bool) -> str | None:
        if pairwise and any(not isinstance(output, SparseMaskedTensor) for output in outputs):
            return "every output has to be stored as what it receives: x.to_layout(layout)"
        return problem_of_sparse(sent, outputs) or super().problem_of(sent, outputs, pairwise)

    def pack(self, sent: Sequence[Tensor], one_mask: bool) -> dict[str, Any]:
        self.records: list[Any] = list(map(stored_record, sent))
        self.entries = list(map(entries_of, self.records))
        partial = any(entries.values.validity is not None for entries in self.entries)
        lengths = tuple([len(entries.keys) for entries in self.entries])
        return {"partial": partial, "entries": lengths, "extents": statements_of(self.records)}

    def form(self, output: int | None = None) -> Form:
        own = self.records and output is None
        return self.entries[0].form if own else form_of(stored_record(self.outputs[output or 0]))

    def fields(self, number: int, known: Known) -> list[Tensor]:
        """The entries of a tensor, and what travels of its extent, as one message of bytes."""
        entries = replace(self.entries[number], there=known.booleans(self.records[number]))
        return [encoded(entries, self.everyone[self.rank].partial)]

    def lengths(self, rank: int, number: int, form: Form, known: Known) -> list[int]:
        description = self.everyone[rank]
        return [sum(form.sizes_in_bytes(description.entries[number], description.partial, known))]

    def buffers(self, lengths: Iterable[int]) -> list[Tensor]:
        return [torch.empty(n, dtype=torch.uint8, device=self.device) for n in lengths]

    def received(self, fields: Sequence[Tensor], rank: int, number: int, form: Form, known: Known) -> Entries:
        description = self.everyone[rank]
        return decoded(fields[0], form, description.entries[number], description.partial, known)

    def reduces(
        self,
        target: Tensor,
        op: str,
        root: int | None = None,
        *,
        scattered: bool = False,
        counted: Counted | None = None,
    ) -> Finish:
        united = self.known.reduced(f"a reduction {op.upper()} over ranks")
        arrived = self.exchanged(parts_of_one=True) if scattered else self.gathered(root)

        def finish() -> Any:
            parts = arrived()
            if not parts:
                return None
            total, number = combined(parts, op, self.form(), united)
            if counted is not None:
                counted(number.record)
            return self.write(target, total)

        return finish

    # ------------------------------------------------------------------------------------------------------- results

    def write(self, target: Tensor, record: Entries) -> Any:
        """Replace `target` by what was received, in the storage of `target`; update a plain `target`."""
        write(target, wrap_sparse(record.record))

    def write_whole(self, target: Tensor, records: Sequence[Entries]) -> Any:
        write(target, in_one([entries.record for entries in records]))

    # --------------------------------------------------------------------------------------------- tensors and parts

    @staticmethod
    def problem_of_rows(large: str, larger: Tensor, small: str, smaller: Tensor, ranks: int) -> str | None:
        fits = larger.ndim == smaller.ndim > 0 and larger.shape == (ranks * smaller.shape[0], *smaller.shape[1:])
        return None if fits else sizes_do_not_fit(large, larger, small, smaller, ranks) + ", one after the other"

    @staticmethod
    def parts(tensor: Tensor, output: Tensor, ranks: int) -> list[Tensor]:
        return list(tensor.split(output.shape[0]))

    @staticmethod
    def rows(tensor: Tensor, splits: Sequence[int], ranks: int) -> list[Tensor]:
        """Return copies, because a part of a sparse tensor stands for a view."""
        parts = tensor.split(list(splits) or tensor.shape[0] // ranks)
        return [wrap_sparse(part.record) if isinstance(part, SparseMaskedTensor) else part for part in parts]


def write(target: Tensor, arrived: MaskedTensor) -> None:
    with torch.no_grad():
        if isinstance(target, MaskedTensor):
            replace_extent(target, arrived._extent)
        target.copy_(arrived)


def in_one(records: Sequence[Sparse]) -> MaskedTensor:
    """Join the rows of records; each row keeps the positions that it has."""
    parts: list[Tensor] = [wrap_sparse(Sparse(record.values, record.pattern)) for record in records]
    joined: Any = torch.cat(parts)
    return with_extent(joined, extent_of_rows(records, "a collective into one tensor"))


def problem_of_sparse(sent: Sequence[Tensor], outputs: Sequence[Tensor]) -> str | None:
    """Say why sparsely stored tensors cannot take part in a collective; None if they can."""
    for tensor in sent:
        if not isinstance(tensor, SparseMaskedTensor):
            return (
                f"a tensor of shape {tuple(tensor.shape)} is stored densely, and another one of this call sparsely. "
                "Store them alike, x.to_layout(layout) or x.to_dense()."
            )
    for tensor in (*sent, *outputs):
        if isinstance(tensor, SparseMaskedTensor) and tensor._order is not None:
            return not_by_itself(tensor)
    for output in outputs:
        if isinstance(output, SparseMaskedTensor) and output._stands_for_a_view:
            return not_by_itself(output)
    return None


def not_by_itself(tensor: SparseMaskedTensor) -> str:
    return (
        f"a tensor of shape {tuple(tensor.shape)} is a view of one that is stored as {tensor.storage_layout}. Store it "
        "by itself: x.to_layout(torch.sparse_coo)."
    )


# --------------------------------- entries: a record as one message of bytes, and the entries of several ranks combined

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

    known  what is known of the extent of the tensor that has them
    there  the booleans of the extent that travel with them, int8
    """

    keys: Tensor
    values: Dense
    form: Form
    known: Known = WITHOUT
    there: Sequence[Tensor] = ()

    @property
    def record(self) -> Sparse:
        """The record that stores these entries, and whose extent is known so."""
        stored = _stored(self, self.form)
        return Sparse(stored.values, stored.pattern, self.known.extent(self.there))


def form_of(record: Sparse) -> Form:
    pattern = record.pattern
    index_dtype = pattern.pieces[0].dtype
    return Form(pattern.layout, pattern.sizes, pattern.block, index_dtype, record.dense_sizes, record.dtype)


def entries_of(record: Sparse) -> Entries:
    """Return the entries of a record, without those that are fully invalid."""
    stored = without_invalid(record)
    if stored.pattern.block is not None:
        listed = tuple(c.to(torch.int64) for c in stored.pattern.listed_coordinates())
        return Entries(ravel(listed, stored.pattern.listed_sizes()), stored.values, form_of(record))
    flat, coordinates = unpadded_elements(stored)
    return Entries(ravel(coordinates, stored.pattern.sizes), flat, form_of(record))


def _stored(entries: Entries, form: Form) -> Sparse:
    coordinates = unravel(entries.keys, form.listed_sizes)
    if form.block is None and not form.layout.exact:
        return from_coordinates(form.layout, coordinates, entries.values, form.sizes)
    order = form.layout.order_of(coordinates, form.listed_sizes)
    pieces = form.layout.pieces_of(tuple(c[order] for c in coordinates), form.listed_sizes, form.index_dtype)
    return Sparse(entries.values.take_rows(order), Pattern(form.layout, form.sizes, pieces, form.block))


def encoded(entries: Entries, partial: bool) -> Tensor:
    """Encode entries as a message, a one-dimensional uint8 tensor."""
    values = entries.values
    parts = [in_bytes(entries.keys.to(entries.form.key_dtype)), in_bytes(values.data.contiguous().view(-1))]
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
    return Entries(keys.clone().view(form.key_dtype).to(torch.int64), Dense(values, valid), form, known, there)


def combined(parts: Sequence[Entries], op: str, form: Form, known: Known) -> tuple[Entries, Entries]:
    """Reduce the valid contributions of all ranks, in the order of the ranks; a position is there where one rank's is.

    It returns the reduction, of whose extent so much is known, and the number of valid contributions to each value,
    int32. The loop adds one rank after the other, so every rank computes the same bits on any device.
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
    return Entries(keys, values, form, known, there), Entries(keys, Dense(number, values.validity), form)
