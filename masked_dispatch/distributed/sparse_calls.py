"""A collective of sparsely stored masked tensors, packed batches included; it densifies nothing.

The ranks send their entries (entries.py), and tell each other the number of entries first. Reductions gather the
entries of all ranks, and each rank combines those it needs on the union of the patterns; torch's own reductions would
need one common pattern.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from masked_dispatch.distributed.calls import Arrived, Call, Counted, Finish, sizes_do_not_fit
from masked_dispatch.distributed.entries import Entries, Form, combined, decoded, encoded, entries_of, form_of
from masked_dispatch.distributed.entries import record_of_entries as rebuilt
from masked_dispatch.distributed.extents import Known, statements_of
from masked_dispatch.distributed.operands import replace_extent
from masked_dispatch.distributed.transport import Awaited
from masked_dispatch.tensor.masked_tensor import MaskedTensor, with_extent
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor, wrap_sparse
from op_registry.extents.joins import extent_of_rows
from op_registry.sparse.record import Sparse


def stored_record(tensor: Tensor) -> Sparse:
    """Return the record of a sparsely stored tensor that is not a view; problem_of_sparse refuses views."""
    assert isinstance(tensor, SparseMaskedTensor)
    record = tensor.record
    assert isinstance(record, Sparse)
    return record


class Parcel:
    """A sparse tensor to send: its form and its entries."""

    def __init__(self, tensor: Tensor) -> None:
        self.record = stored_record(tensor)
        self.form = form_of(self.record)
        self.entries = entries_of(self.record)

    def __len__(self) -> int:
        return len(self.entries.keys)

    @property
    def partial(self) -> bool:
        return self.entries.values.validity is not None


class SparseCall(Call):
    """One collective of sparsely stored tensors; each rank sends its tensors as parcels."""

    parcels: list[Parcel]

    def problem_of(self, sent: Sequence[Tensor], outputs: Sequence[Tensor], pairwise: bool) -> str | None:
        if pairwise and any(not isinstance(output, SparseMaskedTensor) for output in outputs):
            return "every output has to be stored as what it receives: x.to_layout(layout)"
        return problem_of_sparse(sent, outputs)

    def pack(self, sent: Sequence[Tensor], one_mask: bool) -> dict[str, Any]:
        self.parcels = [Parcel(tensor) for tensor in sent]
        partial = any(parcel.partial for parcel in self.parcels)
        extents = statements_of([parcel.record for parcel in self.parcels])
        return {"partial": partial, "entries": tuple(map(len, self.parcels)), "extents": extents}

    # ------------------------------------------------------------------------------------------------------ messages

    def form(self, number: int = 0) -> Form:
        """Return the form of an input, or of the output on a rank that sends nothing."""
        return self.parcels[number].form if self.parcels else form_of(stored_record(self.outputs[number]))

    def message(self, known: Known, number: int = 0, size: int | None = None) -> Tensor:
        """Encode a parcel, of whose extent so much is known, as bytes, padded with zeros to `size`."""
        parcel = self.parcels[number]
        entries = replace(parcel.entries, there=known.booleans(parcel.record))
        message = encoded(entries, parcel.form, self.everyone[self.rank].partial)
        return message if size is None else torch.nn.functional.pad(message, (0, size - len(message)))

    def size(self, known: Known, rank: int, number: int = 0, form: Form | None = None) -> int:
        """Return the number of bytes of a rank's parcel."""
        description = self.everyone[rank]
        return sum((form or self.form()).sizes_in_bytes(description.entries[number], description.partial, known))

    def decoded(self, message: Tensor, known: Known, rank: int, number: int = 0, form: Form | None = None) -> Entries:
        description = self.everyone[rank]
        return decoded(message, form or self.form(), description.entries[number], description.partial, known)

    def from_all(self, root: int | None) -> Callable[[], list[Entries]]:
        """Send the first parcel of every rank, padded to one length, to the root or to all ranks."""
        send: Callable[[Tensor], Awaited] = self.transport.all_gather
        send = send if root is None else functools.partial(self.transport.gather, root=root)
        known = self.known
        longest = max(self.size(known, rank) for rank in range(len(self.everyone)))
        arriving = send(self.message(known, size=longest))
        ranks = range(len(self.everyone) if root in (None, self.rank) else 0)

        def arrived() -> list[Entries]:
            messages = arriving()
            return [self.decoded(messages[r * longest : (r + 1) * longest], known, r) for r in ranks]

        return arrived

    def to_each(
        self, arriving: Sequence[Known], leaving: Sequence[Known]
    ) -> tuple[Callable[[], list[Entries]], list[Form]]:
        """Send a parcel to each rank, and receive one of these forms from each."""
        ranks = range(len(self.everyone))
        forms = [parcel.form for parcel in self.parcels]
        if self.outputs and len(self.outputs) == len(forms):
            forms = [form_of(stored_record(output)) for output in self.outputs]
        sizes = [self.size(arriving[r], r, self.rank, forms[r]) for r in ranks]
        messages = [self.message(leaving[number], number) for number in ranks]
        exchanged = self.transport.all_to_all(torch.cat(messages), sizes, [len(message) for message in messages])

        def arrived() -> list[Entries]:
            parts = exchanged().split(sizes)
            return [self.decoded(parts[r], arriving[r], r, self.rank, forms[r]) for r in ranks]

        return arrived, forms

    def broadcast(self, root: int) -> Arrived:
        mine, known = self.rank == root, Known.of(self.statement(root))
        size = None if mine else self.size(known, root)
        message = self.message(known) if size is None else torch.empty(size, dtype=torch.uint8, device=self.device)
        arriving = self.transport.broadcast(message, root)

        def arrived() -> list[Sparse]:
            message = arriving()
            return [] if mine else [rebuilt(self.decoded(message, known, root), self.form(), known)]

        return arrived

    def gathered(self, root: int | None = None) -> Arrived:
        arrived = self.from_all(root)
        known = self.known_of_each()
        return lambda: [rebuilt(entries, self.form(), known[r]) for r, entries in enumerate(arrived())]

    def scattered(self, root: int) -> Arrived:
        numbers, known = range(len(self.everyone)), Known.of(self.statement(root))
        longest = max(self.size(known, root, number) for number in numbers)
        if self.rank == root:
            sent = torch.cat([self.message(known, number, longest) for number in numbers])
        else:
            sent = torch.empty(longest, dtype=torch.uint8, device=self.device)
        arriving = self.transport.scatter(sent, root)
        return lambda: [rebuilt(self.decoded(arriving(), known, root, self.rank), self.form(), known)]

    def exchanged(self) -> Arrived:
        arriving, leaving = self.known_of_pairs()
        arrived, forms = self.to_each(arriving, leaving)
        return lambda: list(map(rebuilt, arrived(), forms, arriving))

    def reduces(
        self,
        target: Tensor,
        op: str,
        root: int | None = None,
        *,
        scattered: bool = False,
        counted: Counted | None = None,
    ) -> Finish:
        united, known = self.known.reduced(f"a reduction {op.upper()} over ranks"), [self.known] * len(self.everyone)
        arrived = self.to_each(known, known)[0] if scattered else self.from_all(root)

        def finish() -> None:
            parts = arrived()
            if parts:
                total = combined(parts, op, self.form())
                self.write(target, rebuilt(total.entries, self.form(), united))
                if counted is not None:
                    counted(total.numbers(self.form()))

        return finish

    # ------------------------------------------------------------------------------------------------------- results

    @staticmethod
    def write(target: Tensor, record: Sparse) -> None:
        """Replace `target` by the received record, in the storage of `target`; update a plain `target`."""
        write(target, wrap_sparse(record))

    @staticmethod
    def write_whole(target: Tensor, records: Sequence[Sparse]) -> None:
        write(target, in_one(records))

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
