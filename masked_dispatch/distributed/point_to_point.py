"""send and recv of masked tensors.

A message has four parts, each with its own tag, far from the tags of plain messages. Both sides first describe their
tensors; if the descriptions match, the sender sends data and mask. Otherwise both sides raise the same error, and no
part stays in flight for the next receive to mistake for its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from masked_dispatch.distributed.agreement import HEADER, Description, decoded, described, encoded, unanswered
from masked_dispatch.distributed.calls import Call, Finish
from masked_dispatch.distributed.entries import decoded as decoded_entries
from masked_dispatch.distributed.entries import encoded as encoded_entries
from masked_dispatch.distributed.entries import form_of
from masked_dispatch.distributed.entries import record_of_entries as rebuilt
from masked_dispatch.distributed.extents import Known, told_of
from masked_dispatch.distributed.operands import is_partial, problem_of_outputs, record_of
from masked_dispatch.distributed.records import Moved, joined, joined_masks, size_of_masks
from masked_dispatch.distributed.sparse_calls import Parcel, SparseCall, problem_of_sparse, stored_record
from masked_dispatch.distributed.transport import Awaited, awaited, in_bytes
from op_registry import MaskedSemanticsError

# Tags of plain messages are small numbers.
_TAGS = 1 << 28
_PARTS = 4
_OFFERED, _EXPECTED, _DATA, _MASK = range(_PARTS)


class Channel:
    """The messages of one send or recv between this rank and a peer."""

    def __init__(self, group: ProcessGroup, peer: int, tag: int) -> None:
        self.group, self.peer, self.tag = group, peer, _TAGS + _PARTS * tag

    def send(self, part: int, message: Tensor) -> Awaited:
        work = distributed.isend(message, group=self.group, group_dst=self.peer, tag=self.tag + part)
        return awaited(work, message)

    def receive(self, part: int, message: Tensor) -> Awaited:
        work = distributed.irecv(message, group=self.group, group_src=self.peer, tag=self.tag + part)
        return awaited(work, message)


def send(of: type[Call], tensors: list[Tensor], group: ProcessGroup, peer: int, tag: int) -> Finish:
    (tensor,) = tensors
    channel = Channel(group, peer, tag)
    sparse = of is SparseCall
    problem = problem_of_sparse(tensors, []) if sparse else None
    parcel = Parcel(tensor) if sparse and problem is None else None
    record = None if sparse else record_of(tensor)
    told = None if record is None else told_of(record)
    known = Known.of(told)
    partial = is_partial(tensors) or known.travels if parcel is None else parcel.partial
    entries = () if parcel is None else (len(parcel),)
    mine = Description("send", (described(tensor),), partial, problem, entries=entries, extents=(told,) if told else ())
    offered = channel.send(_OFFERED, encoded(mine).to(tensor.device))
    expected = channel.receive(_EXPECTED, torch.empty(HEADER, dtype=torch.uint8, device=tensor.device))

    def send_data() -> Finish:
        check(mine, answer(expected, mine), group, group.rank(), peer)
        if parcel is not None:
            waits = [channel.send(_DATA, encoded_entries(parcel.entries, parcel.form, partial))]
        else:
            assert record is not None
            waits = [channel.send(_DATA, in_bytes(joined([record.data.reshape(-1)])))]
            waits += [channel.send(_MASK, joined_masks([record], 1, [known]))] if partial else []
        return lambda: wait_for(waits)

    sent = in_background(send_data, ("send", group, peer, tag))

    def finish() -> None:
        wait_for_data = sent()
        offered()
        wait_for_data()

    return finish


def wait_for(messages: Sequence[Awaited]) -> None:
    for arrived in messages:
        arrived()


def recv(of: type[Call], tensors: list[Tensor], group: ProcessGroup, peer: int, tag: int) -> Finish:
    (tensor,) = tensors
    channel = Channel(group, peer, tag)
    sparse = of is SparseCall
    problem = (problem_of_sparse([], tensors) if sparse else None) or problem_of_outputs(tensors)
    mine = Description("recv", (described(tensor),), problem=problem)
    sent = channel.send(_EXPECTED, encoded(mine).to(tensor.device))
    offered = channel.receive(_OFFERED, torch.empty(HEADER, dtype=torch.uint8, device=tensor.device))

    def ask_for_data() -> Callable[[], None]:
        offer = answer(offered, mine)
        check(offer, mine, group, peer, group.rank())
        return ask_for_entries(offer) if sparse else ask_for_record(offer)

    def ask_for_entries(offer: Description) -> Callable[[], None]:
        form, (entries,) = form_of(stored_record(tensor)), offer.entries
        size = sum(form.sizes_in_bytes(entries, offer.partial))
        arriving = channel.receive(_DATA, torch.empty(size, dtype=torch.uint8, device=tensor.device))
        return lambda: of.write(tensor, rebuilt(decoded_entries(arriving(), form, entries, offer.partial), form))

    def ask_for_record(offer: Description) -> Callable[[], None]:
        data = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        arriving = channel.receive(_DATA, in_bytes(data))
        masks, known = None, Known.of((offer.extents or (None,))[0])
        if offer.partial:
            fields = torch.empty(size_of_masks(tensor.shape, 1, known), dtype=torch.uint8, device=tensor.device)
            masks = channel.receive(_MASK, fields)
        moved = Moved(lambda: (arriving(), data)[1], masks, known=known)
        return lambda: of.write(tensor, moved.split([tensor.shape])[0])

    asked = in_background(ask_for_data, ("recv", group, peer, tag))

    def finish() -> None:
        write_what_comes = asked()
        sent()
        write_what_comes()

    return finish


# A side of a message stream: "send" or "recv", the group, the peer, the tag.
Side = tuple[str, ProcessGroup, int, int]
# For each side, whether the data of the last message has started to move.
_asked: dict[Side, threading.Event] = {}


def in_background(ask: Callable[[], Finish], key: Side) -> Callable[[], Finish]:
    """Call `ask` in a thread, in the order of the calls; the returned function waits and returns the result of `ask`.

    Data moves as soon as the peer has described its tensor. A thread does this because the peer must not depend on the
    order in which this process waits.
    """
    before, done = _asked.get(key), threading.Event()
    _asked[key] = done
    outcome: list[Finish | Exception] = []

    def run() -> None:
        try:
            if before is not None:
                before.wait()
            outcome.append(ask())
        except Exception as error:
            outcome.append(error)
        finally:
            done.set()

    threading.Thread(target=run, daemon=True).start()

    def wait() -> Finish:
        done.wait()
        if _asked.get(key) is done:
            del _asked[key]
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    return wait


def recv_any_source(of: type[Call], tensors: list[Tensor], group: ProcessGroup, tag: int) -> Finish:
    raise MaskedSemanticsError(
        f"recv from any rank into a masked tensor ({described(tensors[0])}): its mask comes in a message of its own, "
        "which has to be from the same rank. Name the sender, recv(x, src=rank)."
    )


def answer(message: Callable[[], Tensor], mine: Description) -> Description:
    """Wait for the peer's description."""
    try:
        return decoded(message().cpu())
    except RuntimeError as error:
        raise RuntimeError(unanswered(mine)) from error


def check(offer: Description, expected: Description, group: ProcessGroup, sender: int, receiver: int) -> None:
    """Raise the same error on both sides if the sent tensor does not match the expected one."""
    ranks = distributed.get_process_group_ranks(group)
    for side, rank in ((offer, sender), (expected, receiver)):
        if side.problem is not None:
            raise MaskedSemanticsError(f"{side.call} on rank {ranks[rank]}: {side.problem}")
    if (offer.tensors, offer.format) != (expected.tensors, expected.format):
        raise ValueError(
            f"rank {ranks[sender]} sends {offer.tensors[0]} to rank {ranks[receiver]}, which expects "
            f"{expected.tensors[0]}. They need the same dtype, shape and storage, and the same version of this "
            "library."
        )
