"""send and recv of masked tensors.

A message has four parts, each with a tag of its own, far from the tags of plain messages: both sides say what they
have, then data and mask follow. The sender starts all of its messages at once; the receiver asks for data when it has
seen that it fits. If it does not fit, both raise the same error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from masked_dispatch.distributed.agreement import HEADER, Description, decoded, described, encoded, unanswered
from masked_dispatch.distributed.fields import packed_size
from masked_dispatch.distributed.operands import (
    is_partial,
    problem_of_outputs,
    problem_of_storage,
    record_of,
    write,
)
from masked_dispatch.distributed.records import Moved, joined, joined_masks
from masked_dispatch.distributed.transport import Awaited, awaited, in_bytes
from op_registry import MaskedSemanticsError

Finish = Callable[[], None]
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


def send(tensors: list[Tensor], group: ProcessGroup, peer: int, tag: int) -> Finish:
    (tensor,) = tensors
    channel = Channel(group, peer, tag)
    problem = problem_of_storage(tensors)
    mine = Description("send", (described(tensor),), is_partial(tensors), problem)
    waits = [channel.send(_OFFERED, encoded(mine).to(tensor.device))]
    expected = channel.receive(_EXPECTED, torch.empty(HEADER, dtype=torch.uint8, device=tensor.device))
    if problem is None:
        record = record_of(tensor)
        waits.append(channel.send(_DATA, in_bytes(joined([record.data.reshape(-1)]))))
        if mine.partial:
            waits.append(channel.send(_MASK, joined_masks([record])))

    def finish() -> None:
        check(mine, answer(expected, mine), group, group.rank(), peer)
        for wait in waits:
            wait()

    return finish


def recv(tensors: list[Tensor], group: ProcessGroup, peer: int, tag: int) -> Finish:
    (tensor,) = tensors
    channel = Channel(group, peer, tag)
    problem = problem_of_storage(tensors) or problem_of_outputs(tensors)
    mine = Description("recv", (described(tensor),), problem=problem)
    sent = channel.send(_EXPECTED, encoded(mine).to(tensor.device))
    offered = channel.receive(_OFFERED, torch.empty(HEADER, dtype=torch.uint8, device=tensor.device))

    def ask_for_data() -> Moved:
        offer = answer(offered, mine)
        check(offer, mine, group, peer, group.rank())
        data = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        arriving = channel.receive(_DATA, in_bytes(data))
        masks = None
        if offer.partial:
            fields = torch.empty(packed_size(tensor.numel(), 1), dtype=torch.uint8, device=tensor.device)
            masks = channel.receive(_MASK, fields)
        return Moved(lambda: (arriving(), data)[1], masks)

    asked = in_background(ask_for_data, (group, peer, tag))

    def finish() -> None:
        moved = asked()
        sent()
        write(tensor, moved.split([tensor.shape])[0])

    return finish


# For each sender and tag, whether the last receive has asked for its data.
_asked: dict[tuple[ProcessGroup, int, int], threading.Event] = {}


def in_background(ask: Callable[[], Moved], key: tuple[ProcessGroup, int, int]) -> Callable[[], Moved]:
    """Ask for data as soon as the sender has said what it has, in the order of the calls; waiting gives what comes.

    In a thread: a sender completes when it is asked, and must not depend on what this process waits for first.
    """
    before, done = _asked.get(key), threading.Event()
    _asked[key] = done
    outcome: list[Moved | Exception] = []

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

    def wait() -> Moved:
        done.wait()
        if _asked.get(key) is done:
            del _asked[key]
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    return wait


def recv_any_source(tensors: list[Tensor], group: ProcessGroup, tag: int) -> Finish:
    raise MaskedSemanticsError(
        f"recv from any rank into a masked tensor ({described(tensors[0])}): its mask comes in a message of its own, "
        "which has to be from the same rank. Name the sender, recv(x, src=rank)."
    )


def answer(message: Callable[[], Tensor], mine: Description) -> Description:
    """What the peer says."""
    try:
        return decoded(message().cpu())
    except RuntimeError as error:
        raise RuntimeError(unanswered(mine)) from error


def check(offer: Description, expected: Description, group: ProcessGroup, sender: int, receiver: int) -> None:
    """Raise if what is sent is not what is expected: on both sides alike."""
    ranks = distributed.get_process_group_ranks(group)
    for side, rank in ((offer, sender), (expected, receiver)):
        if side.problem is not None:
            raise MaskedSemanticsError(f"{side.call} on rank {ranks[rank]}: {side.problem}")
    if (offer.tensors, offer.format) != (expected.tensors, expected.format):
        raise ValueError(
            f"rank {ranks[sender]} sends {offer.tensors[0]} to rank {ranks[receiver]}, which expects "
            f"{expected.tensors[0]}. They need one dtype, shape and storage, and the same version of this library."
        )
