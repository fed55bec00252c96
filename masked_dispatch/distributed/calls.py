"""A collective of tensors that are stored densely: its operands, what the ranks agree on, and how
they send and write tensors.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
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
from masked_dispatch.distributed.messages import Awaited, Eager, digest_of_mask
from masked_dispatch.distributed.records import (
    Masks,
    Moved,
    exchanged,
    in_one,
    moved,
    moved_to,
    reduced,
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

Finish = Callable[[], None]
# Waits, and returns the records that this rank receives.
Arrived = Callable[[], list[Any]]
# A callback that receives the number of contributions to each element of a reduction.
Counted = Callable[[Any], None]
Agreement = Callable[[ProcessGroup, Description, torch.device], list[Description]]


class Call:
    """One collective: the result of the agreement, and the transport."""

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
        self.rank, self.transport, self.outputs = group.rank(), Eager(group), outputs
        self.device = (*sent, *outputs)[0].device
        problem = problem or self.problem_of(sent, outputs, pairwise) or problem_of_outputs(outputs)
        packed = {} if problem else self.pack(sent, one_mask)
        if root not in (None, self.rank):
            packed["extents"] = None
        elif not pairwise and len(packed.get("extents", ())) > 1:
            problem = problem_of_several(packed["extents"])
            packed["extents"] = (statement_of_several(packed["extents"]),)
        texts = tuple([described(tensor) for tensor in sent] if shown is None else shown)
        expected = tuple(described(tensor) for tensor in outputs) if pairwise else None
        mine = Description(name, texts, problem=problem, expected=expected, apart=apart, **packed)
        self.everyone = (agreement or agree)(group, mine, self.device)

    def problem_of(self, sent: Sequence[Tensor], outputs: Sequence[Tensor], pairwise: bool) -> str | None:
        """Say why tensors cannot take part for how they are stored; None if they can."""
        return None

    def pack(self, sent: Sequence[Tensor], one_mask: bool) -> dict[str, Any]:
        """Prepare what this rank sends, and return what it says about that in its description."""
        self.records = [record_of(tensor) for tensor in sent]
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

    # ------------------------------------------------------------------------------------------------------ messages

    def broadcast(self, root: int) -> Arrived:
        """Send the root's tensor to all other ranks."""
        arriving = self.from_root(root, self.transport.broadcast)
        return lambda: arriving.split([] if self.rank == root else [self.outputs[0].shape])

    def gathered(self, root: int | None = None) -> Arrived:
        """Send the tensor of every rank to the root, or to all ranks."""
        (record,) = self.records
        send = self.transport.all_gather if root is None else functools.partial(self.transport.gather, root=root)
        arriving = moved([record], any_partial(self.everyone), send, known=self.known)
        ranks = self.transport.ranks if root in (None, self.rank) else 0
        arriving.known = self.known_of_each()[:ranks]
        return lambda: arriving.split([record.shape] * ranks)

    def scattered(self, root: int) -> Arrived:
        """Send one of the root's tensors to each rank."""
        arriving = self.from_root(root, self.transport.scatter)
        return lambda: arriving.split([self.outputs[0].shape])

    def from_root(self, root: int, send: Callable[[Tensor, int], Awaited]) -> Moved:
        """Send the root's tensors, or receive the one that it sends here."""
        partial, known = self.everyone[root].partial, Known.of(self.statement(root))
        if self.rank == root:
            return moved(self.records, partial, lambda data: send(data, root), known=known)
        return moved_to(self.outputs[0], partial, lambda data: send(data, root), known)

    def exchanged(self) -> Arrived:
        """Send a tensor to each rank, and receive one from each."""
        received, partial = [output.shape for output in self.outputs], any_partial(self.everyone)
        known = self.known_of_pairs()
        arriving = exchanged(self.records, received, partial, self.transport.all_to_all, known=known)
        return lambda: arriving.split(received)

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
        in_place = root is None and not scattered and owns_memory(target)
        known = masks_to_reduce(self.everyone)
        ranks, extent = self.transport.ranks, self.known
        total = reduced(self.records, op, ranks, known, send, overwritten=in_place, extent=extent)

        def finish() -> None:
            result = total()
            if root in (None, self.rank):
                self.write(target, result)

        return finish

    # ------------------------------------------------------------------------------------------------------- results

    @staticmethod
    def write(target: Tensor, record: Any) -> None:
        write(target, record)

    @staticmethod
    def write_whole(target: Tensor, records: Sequence[Any]) -> None:
        """Write the records one behind the other."""
        write(target, in_one(records, target.shape))

    def writes(self, targets: Sequence[Tensor], arrived: Arrived) -> Finish:
        """Return a function that waits for a record for each target, and writes it."""

        def finish() -> None:
            for target, record in zip(targets, arrived(), strict=True):
                self.write(target, record)

        return finish

    def writes_whole(self, target: Tensor, arrived: Arrived) -> Finish:
        """Return a function that waits for all records, if this rank receives any, and writes them to one tensor."""

        def finish() -> None:
            records = arrived()
            if records:
                self.write_whole(target, records)

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
        return list(tensor.contiguous().view(ranks, *output.shape)) if ranks > 1 else [tensor]

    @staticmethod
    def rows(tensor: Tensor, splits: Sequence[int], ranks: int) -> list[Tensor]:
        """Return some rows for each rank: as `splits` says, or equally many."""
        return list(tensor.split(list(splits) or tensor.shape[0] // ranks)) if ranks > 1 else [tensor]


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
    outcome: list[Exception | None] = []

    def wait(timeout: timedelta) -> bool:
        with lock:
            if not outcome:
                outcome.append(_outcome(finish))
        error = outcome[0]
        if error is not None:
            raise error
        return True

    return work_that_calls(wait)


def _outcome(finish: Callable[[], None]) -> Exception | None:
    try:
        finish()
    except Exception as error:
        return error
    return None
