"""A collective: its operands, what the ranks agree on, which fields of a tensor they send, and what arrives.

`Call` moves and reduces tensors that are stored densely; its subclasses say what differs for sparse storage, and for
collectives that return new tensors.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from masked_dispatch.distributed.agreement import Description, agree, described
from masked_dispatch.distributed.extents import (
    Known,
    Statement,
    problem_of_several,
    statement_of_several,
    statements_of,
)
from masked_dispatch.distributed.messages import Eager, Functional, digest_of_mask, settle, unpack
from masked_dispatch.distributed.records import (
    Masks,
    in_one,
    joined,
    joined_masks,
    parts_of,
    reduced,
    size_of_masks,
)
from masked_dispatch.distributed_internals import work_that_calls
from masked_dispatch.tensor.extents import forget_extent, receive_extent
from masked_dispatch.tensor.mask_sharing import shared_validity, write_validity
from masked_dispatch.tensor.masked_tensor import MaskedTensor, with_extent, wrap
from masked_dispatch.tensor.messages import with_copied_mask, written_through_view
from masked_dispatch.torch_internals import share_memory
from op_registry import MaskedSemanticsError
from op_registry.records.dense import Dense
from op_registry.records.extent import Extent

# ------------------------------------------------------------------------------------------------- operands and outputs


def record_of(tensor: Tensor) -> Dense:
    """Return data, validity and extent without autograd; a plain tensor is valid everywhere."""
    if isinstance(tensor, MaskedTensor):
        data = tensor._data  # avoid a new view: the data itself keeps more information, such as its known zeros
        return Dense(data.detach() if data.requires_grad else data, shared_validity(tensor), tensor._extent)
    return Dense(tensor.detach(), None)


def is_partial(tensors: Iterable[Tensor]) -> bool:
    """Return whether one of the tensors stores a mask."""
    return any(type(t) is MaskedTensor and t._validity is not None for t in tensors)


def problem_of_outputs(outputs: Iterable[Tensor]) -> str | None:
    """Say why the outputs cannot take results, or None; callers check this before they send anything."""
    for tensor in outputs:
        if isinstance(tensor, MaskedTensor) and tensor._mask_is_a_copy and complex_base(tensor) is None:
            return f"the result would be written through {with_copied_mask(tensor)}. Pass the base, or a clone."
    return None


def complex_base(tensor: MaskedTensor) -> Tensor | None:
    """Return the complex tensor that torch.distributed passed to `torch.view_as_real`; None for other tensors."""
    base = tensor._base
    if base is None or not base.is_complex() or tensor.is_complex() or tensor.shape[-1:] != (2,):
        return None
    strides = [stride // 2 for stride in tensor.stride()[:-1]]
    if base.shape == tensor.shape[:-1] and list(base.stride()) == strides:
        return base
    return base.as_strided(tensor.shape[:-1], strides, tensor.storage_offset() // 2)


def owns_memory(tensor: Tensor) -> TypeGuard[MaskedTensor]:
    """Return whether a collective may reduce in place in the tensor's data."""
    return type(tensor) is MaskedTensor and not tensor._mask_is_a_copy


def write(target: Tensor, record: Dense) -> None:
    """Write the received record to `target`: data, mask and extent to a masked tensor, which has them from then on;
    only valid elements to a plain one.
    """
    with torch.no_grad():
        data, validity = record.data.view(target.shape), record.validity
        if owns_memory(target) and share_memory(data, target._data):
            replace_extent(target, record.extent)
            # The data was reduced in place; copy_ would copy it onto itself.
            torch.autograd.graph.increment_version([target, target._data])
            write_validity(target, validity)
            receive_extent(target, record.extent)
            return
        if validity is not None:
            validity = validity.view(torch.int8).view(target.shape)
        arrived: Tensor = with_extent(wrap(data, validity), record.extent)
        if isinstance(target, MaskedTensor) and target._mask_is_a_copy:
            target, arrived = complex_base(target), torch.view_as_complex(arrived)  # type: ignore[assignment]
        if isinstance(target, MaskedTensor):
            replace_extent(target, arrived._extent)  # type: ignore[attr-defined]
        target.copy_(arrived)


def replace_extent(target: MaskedTensor, received: Extent | None) -> None:
    """Let a tensor be without the extent that it has, before it receives another, or none.

    Raises MaskedSemanticsError for a view of another extent: its base could not learn of the received one.
    """
    own = target._extent
    if target._base is not None and (own.places if own else ()) != (received.places if received else ()):
        raise MaskedSemanticsError(written_through_view(target))
    forget_extent(target)


# -------------------------------------------------------------------------------------------------------- the agreement

# Waits, and returns what the collective returns, if it makes new tensors.
Finish = Callable[[], Any]
# Waits, and returns the records that this rank receives.
Arrived = Callable[[], list[Any]]
# A callback that receives the number of contributions to each element of a reduction.
Counted = Callable[[Any], None]
Agreement = Callable[[ProcessGroup, Description, torch.device], list[Description]]


class Call:
    """One collective: the result of the agreement, and the transport."""

    # Whether results are new tensors; otherwise they are written to the outputs.
    returns = False
    transport: Any

    def __init__(
        self,
        group: ProcessGroup,
        name: str,
        sent: Sequence[Tensor],
        outputs: Sequence[Tensor],
        *,
        shown: Sequence[str] | None = None,
        problem: str | None = None,
        pairwise: bool = False,
        apart: bool = False,
        one_mask: bool = False,
        root: int | None = None,
        agreement: Agreement | None = None,
    ) -> None:
        """Agree with the other ranks. `shown` describes what must be equal on all ranks, by default the sent tensors.

        pairwise   compare only each sent tensor with the one that its receiver expects
        apart      whether the tensors of all ranks stay apart, as rows of one tensor do
        one_mask   if the mask is equal on all ranks, they need not send it
        root       the only rank that sends, if there is one
        agreement  returns the descriptions of all ranks for this rank's; by default `agree`, which compares them
        """
        self.rank, self.root, self.outputs = group.rank(), root, outputs
        self.device = (*sent, *outputs)[0].device
        self.transport = self.transport_of(group, sent)
        problem = problem or self.problem_of(sent, outputs, pairwise)
        packed = {} if problem else self.pack(sent, one_mask)
        if root not in (None, self.rank):
            packed["extents"] = None
        elif not pairwise and len(packed.get("extents", ())) > 1:
            problem = problem_of_several(packed["extents"])
            packed["extents"] = (statement_of_several(packed["extents"]),)
        texts = tuple([described(tensor) for tensor in sent] if shown is None else shown)
        expected = tuple(described(tensor) for tensor in outputs) if pairwise else None
        mine = Description(name, texts, problem=problem, expected=expected, apart=apart, **packed)
        self.everyone = (agreement or self.agree)(group, mine, self.device)

    def transport_of(self, group: ProcessGroup, sent: Sequence[Tensor]) -> Any:
        return Eager(group)

    def agree(self, group: ProcessGroup, mine: Description, device: torch.device) -> list[Description]:
        return agree(group, mine, device)

    def record_of(self, tensor: Tensor) -> Dense:
        return record_of(tensor)

    def problem_of(self, sent: Sequence[Tensor], outputs: Sequence[Tensor], pairwise: bool) -> str | None:
        """Say why tensors cannot take part for how they are stored; None if they can."""
        return problem_of_outputs(outputs)

    def pack(self, sent: Sequence[Tensor], one_mask: bool) -> dict[str, Any]:
        """Prepare what this rank sends, and return what it says about that in its description."""
        self.records = [self.record_of(tensor) for tensor in sent]
        statements = statements_of(self.records)
        partial = is_partial(sent) or any(Known.of(t).travels for t in statements)
        mask = digest_of_mask(self.records[0].validity) if one_mask else None
        return {"partial": partial, "mask": mask, "extents": statements}

    def statement(self, rank: int) -> Statement:
        """What a rank states of the extent of the tensors that it sends."""
        return (self.everyone[rank].extents or (None,))[0]

    @property
    def known(self) -> Known:
        """What all ranks know of their extents."""
        return Known.of_all([self.statement(rank) for rank in range(len(self.everyone))])

    def known_of_each(self) -> list[Known]:
        """What is known of the extent of each rank's tensor, where these stay apart."""
        common = self.known
        if common.known is None:
            return [common] * len(self.everyone)
        return [replace(Known.of(self.statement(rank)), is_mask=common.is_mask) for rank in range(len(self.everyone))]

    def known_of_pairs(self) -> tuple[list[Known], list[Known]]:
        """What is known of the extents that this rank receives from each, and sends to each."""
        received = [Known.of((d.extents or [None] * len(self.everyone))[self.rank]) for d in self.everyone]
        sent = self.everyone[self.rank].extents or [None] * len(self.everyone)
        return received, list(map(Known.of, sent))

    # ---------------------------------------------------------------------------------------------- fields of a tensor

    @property
    def partial(self) -> bool:
        """Whether masks travel."""
        return any_partial(self.everyone if self.root is None else [self.everyone[self.root]])

    def form(self, output: int | None = None) -> Any:
        """What all ranks know of a tensor before it arrives: of an output, or of what this rank sends, if anything."""
        return self.records[0].shape if self.records and output is None else self.outputs[output or 0].shape

    def fields(self, number: int, known: Known) -> list[Tensor]:
        """One of this rank's tensors as one-dimensional messages: its data, and its masks if they travel."""
        record = self.records[number]
        masks = [joined_masks([record], self.transport.width, [known])] if self.partial else []
        return [record.data.reshape(-1).contiguous(), *masks]

    def lengths(self, rank: int, number: int, form: Any, known: Known) -> list[int]:
        """The lengths of these messages from a rank."""
        masks = [size_of_masks(form, self.transport.width, known)] if self.partial else []
        return [form.numel(), *masks]

    def buffers(self, lengths: Iterable[int]) -> list[Tensor]:
        """Memory for messages of these lengths."""
        dtypes = (self.outputs[0].dtype, torch.uint8)
        return [torch.empty(n, dtype=d, device=self.device) for n, d in zip(lengths, dtypes, strict=False)]

    def received(self, fields: Sequence[Tensor], rank: int, number: int, form: Any, known: Known) -> Any:
        """What a rank has sent as these messages."""
        data, *masks = fields
        if not masks:
            return Dense(data.view(form), None, known.extent([]))
        shapes, width = [form, *known.shapes(form)], self.transport.width
        parts = zip(parts_of(masks[0], width, shapes), shapes, strict=True)
        validity, *there = [unpack(part, width, s.numel()).view(torch.int8).view(s) for part, s in parts]
        return Dense(data.view(form), validity, known.extent(there))

    # ------------------------------------------------------------------------------------------------------ messages

    def receives(self, root: int) -> bool:
        """Whether what the root sends makes a result on this rank."""
        return self.returns or self.rank != root

    def broadcast(self, root: int) -> Arrived:
        """Send the root's tensor to all other ranks."""
        known, form = Known.of(self.statement(root)), self.form()
        # torch records a derivative on the ranks that receive, too.
        sends = self.rank == root or isinstance(self.transport, Functional)
        fields = self.fields(0, known) if sends else self.buffers(self.lengths(root, 0, form, known))
        arriving = [self.transport.broadcast(field, root) for field in fields]

        def arrived() -> list[Any]:
            parts = [wait() for wait in arriving]
            return [self.received(parts, root, 0, form, known)] if self.receives(root) else []

        return arrived

    def gathered(self, root: int | None = None) -> Arrived:
        """Send the tensor of every rank to the root, or to all ranks."""
        send: Any = self.transport.all_gather
        send = send if root is None else functools.partial(self.transport.gather, root=root)
        form, each = self.form(), self.known_of_each()
        lengths = [self.lengths(rank, 0, form, known) for rank, known in enumerate(each)]
        longest = list(map(max, zip(*lengths, strict=True)))
        arriving = [send(extended(f, n)) for f, n in zip(self.fields(0, self.known), longest, strict=True)]

        def arrived() -> list[Any]:
            messages = [wait() for wait in arriving]
            if root not in (None, self.rank):
                return []
            rows = zip(*[m.view(len(each), n) for m, n in zip(messages, longest, strict=True)], strict=True)
            return [
                self.received(list(map(shortened, row, lengths[rank])), rank, 0, form, each[rank])
                for rank, row in enumerate(rows)
            ]

        return arrived

    def scattered(self, root: int) -> Arrived:
        """Send one of the root's tensors to each rank."""
        form, known, ranks = self.form(), Known.of(self.statement(root)), range(len(self.everyone))
        lengths = [self.lengths(root, number, form, known) for number in ranks]
        longest = list(map(max, zip(*lengths, strict=True)))
        if self.rank == root:
            fields = zip(*[self.fields(number, known) for number in ranks], strict=True)
            messages = [joined([extended(f, n) for f in each]) for each, n in zip(fields, longest, strict=True)]
        else:
            messages = self.buffers(longest)
        arriving = [self.transport.scatter(message, root) for message in messages]

        def arrived() -> list[Any]:
            parts = [shortened(wait(), n) for wait, n in zip(arriving, lengths[self.rank], strict=True)]
            return [self.received(parts, root, self.rank, form, known)]

        return arrived

    def exchanged(self, parts_of_one: bool = False) -> Arrived:
        """Send a tensor to each rank, and receive one from each: of the form of the outputs, or of one form."""
        ranks = range(len(self.everyone))
        arriving, leaving = ([self.known] * len(ranks),) * 2 if parts_of_one else self.known_of_pairs()
        forms = [self.form(None if parts_of_one else rank) for rank in ranks]
        lengths = [self.lengths(rank, self.rank, forms[rank], arriving[rank]) for rank in ranks]
        fields = zip(*[self.fields(number, leaving[number]) for number in ranks], strict=True)
        moving = [
            (self.transport.all_to_all(joined(each), sizes, [field.numel() for field in each]), sizes)
            for each, sizes in zip(fields, zip(*lengths, strict=True), strict=True)
        ]

        def arrived() -> list[Any]:
            rows = zip(*[wait().split(sizes) for wait, sizes in moving], strict=True)
            return [self.received(row, r, self.rank, forms[r], arriving[r]) for r, row in enumerate(rows)]

        return arrived

    def reduces(
        self,
        target: Tensor,
        op: str,
        root: int | None = None,
        *,
        scattered: bool = False,
        counted: Counted | None = None,
    ) -> Finish:
        """Reduce the tensors of all ranks into `target`, on all ranks or the root.

        scattered  each rank sends a tensor for each rank, and gets the reduction of those for it
        counted    gets the number of contributions; only sparse storage counts them
        """
        everywhere = self.transport.reduce_scatter if scattered else self.transport.all_reduce
        send = everywhere if root is None else functools.partial(self.transport.reduce, root=root)
        in_place = not (self.returns or scattered) and root is None and owns_memory(target)
        total = reduced(
            self.records,
            op,
            self.transport.ranks,
            masks_to_reduce(self.everyone),
            send,
            narrow=self.transport.width < 8,
            overwritten=in_place,
            extent=self.known,
        )

        def finish() -> Any:
            result = total()
            return self.write(target, result) if root in (None, self.rank) else None

        return finish

    # ------------------------------------------------------------------------------------------------------- results

    def write(self, target: Tensor, record: Any) -> Any:
        write(target, record)

    def write_whole(self, target: Tensor, records: Sequence[Any]) -> Any:
        """Write the records one behind the other."""
        return self.write(target, in_one(records, target.shape))

    def writes(self, targets: Sequence[Tensor], arrived: Arrived) -> Finish:
        """Return a function that waits for a record for each target, and writes it."""
        return lambda: [self.write(target, record) for target, record in zip(targets, arrived(), strict=True)]

    def writes_whole(self, target: Tensor, arrived: Arrived) -> Finish:
        """Return a function that waits for all records, if this rank receives any, and writes them to one tensor."""

        def finish() -> Any:
            records = arrived()
            return self.write_whole(target, records) if records else None

        return finish

    # --------------------------------------------------------------------------------------------- tensors and parts

    @staticmethod
    def problem_of_rows(large: str, larger: Tensor, small: str, smaller: Tensor, ranks: int) -> str | None:
        """Say why the larger tensor does not hold the smaller one once for each rank; None if it does."""
        fits = larger.numel() == ranks * smaller.numel()
        return None if fits else sizes_do_not_fit(large, larger, small, smaller, ranks)

    @staticmethod
    def parts(tensor: Tensor, output: Tensor, ranks: int) -> list[Tensor]:
        """Return a part like the output for each rank."""
        check_rows(tensor)
        return list(tensor.contiguous().view(ranks, *output.shape)) if ranks > 1 else [tensor]

    @staticmethod
    def rows(tensor: Tensor, splits: Sequence[int], ranks: int) -> list[Tensor]:
        """Return some rows for each rank: as `splits` says, or equally many."""
        check_rows(tensor)
        return list(tensor.split(list(splits) or tensor.shape[0] // ranks)) if ranks > 1 else [tensor]


def check_rows(tensor: Tensor) -> None:
    """Refuse rows of a tensor for different ranks, if they number the positions of its samples."""
    if isinstance(tensor, MaskedTensor) and tensor._extent is not None and tensor._extent.numbers(0):
        raise MaskedSemanticsError(
            f"rows of a tensor of shape {tuple(tensor.shape)}, which number the positions of its samples, would go to "
            "different ranks. Move the samples to the front, x.transpose(0, 1); or pass x.without_extent(), in which "
            "padding counts as missing."
        )


def extended(message: Tensor, size: int) -> Tensor:
    """The message, with zeros behind it up to this size."""
    missing = size - message.numel()
    return torch.nn.functional.pad(message, (0, missing)) if missing else message


def shortened(message: Tensor, size: int) -> Tensor:
    return message[:size]


def any_partial(everyone: Sequence[Description]) -> bool:
    return any(description.partial for description in everyone)


def masks_to_reduce(everyone: Sequence[Description]) -> Masks:
    """Return what the descriptions say about the masks, before any rank sends its mask."""
    if not any_partial(everyone):
        return Masks.NONE
    digests = {description.mask for description in everyone}
    return Masks.EQUAL if len(digests) == 1 and None not in digests else Masks.ANY


def sizes_do_not_fit(large: str, larger: Tensor, small: str, smaller: Tensor, ranks: int) -> str:
    return (
        f"{large} of shape {tuple(larger.shape)} needs {ranks} times the elements of {small} of shape "
        f"{tuple(smaller.shape)}, one part for each rank"
    )


# ------------------------------------------------------------------------------- the Work of an asynchronous collective


def work_for(finish: Callable[[], None]) -> Any:
    """Return a Work whose first `wait()` calls `finish`; every `wait()` raises the error of that call, if any."""
    lock = threading.Lock()
    outcome: Future[None] = Future()

    def wait(timeout: timedelta) -> bool:
        with lock:
            if not outcome.done():
                settle(outcome, finish)
        outcome.result()
        return True

    return work_that_calls(wait)
