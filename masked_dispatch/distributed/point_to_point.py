"""send and recv of masked tensors.

A message has four parts, each with its own tag, far from the tags of plain messages. Both sides first describe their
tensors; if the descriptions match, the sender sends data and mask. Otherwise both sides raise the same error, and no
part stays in flight for the next receive to mistake for its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from masked_dispatch.distributed.agreement import (
    HEADER,
    Description,
    check_problems,
    decoded,
    described,
    encoded,
    unanswered,
)
from masked_dispatch.distributed.calls import Call, Finish
from masked_dispatch.distributed.messages import Awaited, Eager, awaited, in_bytes, settle
from op_registry import MaskedSemanticsError

# Tags of plain messages are small numbers.
_TAGS = 1 << 28
_PARTS = 4
_OFFERED, _EXPECTED, _DATA, _MASK = range(_PARTS)


class Channel(Eager):
    """The transport of one send or recv between this rank and a peer: what the sender broadcasts reaches the other."""

    def __init__(self, group: ProcessGroup, peer: int, tag: int) -> None:
        super().__init__(group)
        self.peer, self.tag = peer, _TAGS + _PARTS * tag
        self.parts = iter((_DATA, _MASK))

    def send(self, part: int, message: Tensor) -> Awaited:
        work = distributed.isend(message, group=self.group, group_dst=self.peer, tag=self.tag + part)
        return awaited(work, message)

    def receive(self, part: int, message: Tensor) -> Awaited:
        work = distributed.irecv(message, group=self.group, group_src=self.peer, tag=self.tag + part)
        return awaited(work, message)

    def broadcast(self, data: Tensor, root: int) -> Awaited:
        move = self.receive if root == self.peer else self.send
        arrived = move(next(self.parts), in_bytes(data))
        return lambda: (arrived(), data)[1]


def send(of: type[Call], tensors: list[Tensor], group: ProcessGroup, peer: int, tag: int) -> Finish:
    call = of(group, "send", tensors, [], root=group.rank(), agreement=not_yet)
    return moved_between(call, Channel(group, peer, tag), call.rank, peer)


def recv(of: type[Call], tensors: list[Tensor], group: ProcessGroup, peer: int, tag: int) -> Finish:
    call = of(group, "recv", [], tensors, shown=list(map(described, tensors)), root=peer, agreement=not_yet)
    return moved_between(call, Channel(group, peer, tag), peer, call.rank)


def not_yet(group: ProcessGroup, mine: Description, device: torch.device) -> list[Description]:
    """Wait for no other rank: the peer's description comes while this process goes on."""
    return [mine]


def moved_between(call: Call, channel: Channel, sender: int, receiver: int) -> Finish:
    """Move a tensor from the sender to the receiver, one of which is this rank, once their descriptions match."""
    call.transport = channel
    (mine,) = call.everyone
    own, others = (_OFFERED, _EXPECTED) if call.rank == sender else (_EXPECTED, _OFFERED)
    sent = channel.send(own, encoded(mine).to(call.device))
    answered = channel.receive(others, torch.empty(HEADER, dtype=torch.uint8, device=call.device))

    def move() -> Finish:
        theirs = answer(answered, mine)
        call.everyone = [theirs if rank == channel.peer else mine for rank in range(channel.ranks)]
        check(call.everyone[sender], call.everyone[receiver], channel.group, sender, receiver)
        return call.writes(call.outputs, call.broadcast(sender))

    moving = in_background(move, (mine.call, channel.group, channel.peer, channel.tag))

    def finish() -> None:
        write_what_comes = moving()
        sent()
        write_what_comes()

    return finish


# A side of a message stream: "send" or "recv", the group, the peer, the tag.
Side = tuple[str, ProcessGroup, int, int]
# For each side, what writes the last message, once its data has started to move.
_asked: dict[Side, Future[Finish]] = {}


def in_background(ask: Callable[[], Finish], key: Side) -> Callable[[], Finish]:
    """Call `ask` in a thread, in the order of the calls; the returned function waits and returns the result of `ask`.

    Data moves as soon as the peer has described its tensor. A thread does this because the peer must not depend on the
    order in which this process waits.
    """
    before, outcome = _asked.get(key), Future[Finish]()
    _asked[key] = outcome

    def run() -> None:
        if before is not None:
            before.exception()  # waits
        settle(outcome, ask)

    threading.Thread(target=run, daemon=True).start()

    def wait() -> Finish:
        outcome.exception()  # waits
        if _asked.get(key) is outcome:
            del _asked[key]
        return outcome.result()

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
    check_problems([ranks[sender], ranks[receiver]], [offer, expected])
    if (offer.tensors, offer.format) != (expected.tensors, expected.format):
        raise ValueError(
            f"rank {ranks[sender]} sends {offer.tensors[0]} to rank {ranks[receiver]}, which expects "
            f"{expected.tensors[0]}. They need the same dtype, shape and storage, and the same version of this "
            "library."
        )
