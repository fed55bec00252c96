"""The ranks of a group describe their tensors to each other before they send masked tensors.

Each rank sends a short description to all others. If the descriptions do not match, or a rank cannot take part, all
ranks raise the same error, which names the tensors of each rank; otherwise the data moves. A rank that passes only
plain tensors calls torch's own collective and sends no description, so the other ranks raise when the group's timeout
expires. With gloo, descriptions are messages between two ranks, under a tag of their own: gloo ends a process whose
collective receives more bytes than it expects, as that of a rank with plain tensors would.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from masked_dispatch.distributed.extents import Statement, compared, compared_apart, in_words
from masked_dispatch.distributed.messages import awaited
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from op_registry import MaskedSemanticsError
from op_registry.older_torch import all_gather_single

# A message has this many bytes: its length, the text, zeros. Longer descriptions take a second message.
HEADER = 512
_LENGTH = 4
# Tags of plain messages are small numbers, and those of masked ones (point_to_point.py) larger.
_TAG = 1 << 27
# A description with another format comes from another version of this library.
FORMAT = 5


@dataclass(frozen=True)
class Description:
    """A rank's description of its part in a collective.

    call     the collective, with its reduction or root: equal on all ranks
    tensors  dtype, shape and storage: equal on all ranks, except in pairwise calls such as all_to_all
    partial  whether some element is invalid, so that the ranks must send masks
    problem  the reason why this rank cannot take part, or None
    expected for an all_to_all: what this rank expects from each rank; `tensors` then lists what it sends to each
    entries  the number of entries of each sparsely stored tensor that this rank sends
    mask     a digest of the reduced tensor's mask, where the rank knows it
    extents  what is known of the extent of each sent tensor, () if none has one: equal on all ranks, except in pairwise
             calls; None on a rank that only receives
    apart    whether the tensors of all ranks stay apart: then samples may begin and end elsewhere on each rank
    """

    call: str
    tensors: tuple[str, ...]
    partial: bool = False
    problem: str | None = None
    expected: tuple[str, ...] | None = None
    entries: tuple[int, ...] = ()
    mask: str | None = None
    extents: tuple[Statement, ...] | None = ()
    apart: bool = False
    format: int = FORMAT


def described(tensor: Tensor) -> str:
    """Describe dtype, shape and storage of a tensor; plain and dense masked tensors have the same storage."""
    storage = f", stored as {storage_of(tensor)}" if isinstance(tensor, SparseMaskedTensor) else ""
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}{storage}"


def storage_of(tensor: SparseMaskedTensor) -> str:
    """Describe a sparse layout with every property that must be equal for tensors to have entries of one form."""
    pattern = tensor._pattern
    blocks = f" in blocks of {pattern.block}" if pattern.block else ""
    dense = f" with {pattern.ndim} sparse dimensions" if pattern.ndim < tensor.ndim else ""
    return f"{tensor.storage_layout}{blocks}{dense}"


def encoded(description: Description, size: int = HEADER) -> Tensor:
    """Encode a description as `size` bytes, truncated if necessary; the length in front is that of the full text."""
    text = json.dumps(asdict(description)).encode()
    message = len(text).to_bytes(_LENGTH, "little") + text
    return torch.frombuffer(bytearray(message[:size].ljust(size, b"\0")), dtype=torch.uint8)


def length_of(message: Tensor) -> int:
    """Return the number of bytes of the whole message."""
    return _LENGTH + int.from_bytes(bytes(message[:_LENGTH].tolist()), "little")


def decoded(message: Tensor) -> Description:
    text = bytes(message[_LENGTH : length_of(message)].tolist()).decode()
    fields = json.loads(text)
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return Description(**{**fields, **lists})


def agree(group: distributed.ProcessGroup, mine: Description, device: torch.device) -> list[Description]:
    """Return the descriptions of all ranks, in the order of ranks; raise the same error on all ranks if some differ.

    This waits for all ranks, even in an asynchronous collective.
    """
    everyone = exchange(group, mine, device)
    check(group, everyone)
    return everyone


def agree_that_all_are_alike(group: distributed.ProcessGroup, mine: Description, device: torch.device) -> None:
    """Check that all descriptions are equal, in a message whose size does not depend on the number of ranks.

    Only this library's own functions may call this: in torch's collectives, a rank with plain tensors would call
    all_reduce as well and could not be told apart.
    """
    if group.size() == 1:
        return
    check_device(mine, device)
    text = json.dumps(asdict(mine)).encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
    largest = torch.tensor([digest, -digest], device=device)
    try:
        distributed.all_reduce(largest, distributed.ReduceOp.MAX, group=group)
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(unanswered(mine)) from error
    highest, lowest = largest.tolist()
    if highest != -lowest:
        agree(group, mine, device)


def exchange(group: distributed.ProcessGroup, mine: Description, device: torch.device) -> list[Description]:
    """Return the descriptions of all ranks without checking them."""
    if group.size() == 1:
        return [mine]
    check_device(mine, device)
    try:
        messages = _gathered(group, encoded(mine), device)
        first, like_first, others = _unlike_the_first(messages)
        longest = max(length_of(message) for message in (first, *others))
        if longest > HEADER:
            messages = _gathered(group, encoded(mine, longest), device)
            first, like_first, others = _unlike_the_first(messages)
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(unanswered(mine)) from error
    common, rest = decoded(first), iter(others)
    return [common if alike else decoded(next(rest)) for alike in like_first]


def check_device(mine: Description, device: torch.device) -> None:
    """Refuse the meta device, which cannot send descriptions; the error must not blame the other ranks."""
    if device.type == "meta":
        raise MaskedSemanticsError(
            f"{mine.call} of a masked tensor ({', '.join(mine.tensors)}) on the device meta, where a tensor has no "
            "values, so the ranks cannot describe their arguments to each other: move it to a device, "
            "torch.empty_like(x, device='cpu'), or leave out the call if you only need shapes"
        )


def _gathered(group: distributed.ProcessGroup, message: Tensor, device: torch.device) -> Tensor:
    """Gather the messages of all ranks, a row for each rank."""
    if f"{device.type}:gloo" in distributed.get_backend_config(group).split(","):
        return _passed_on(group, message.to(device)).cpu()
    messages = torch.empty(group.size() * len(message), dtype=torch.uint8, device=device)
    all_gather_single()(messages, message.to(device), group=group)
    return messages.cpu().view(group.size(), -1)


def _passed_on(group: distributed.ProcessGroup, message: Tensor) -> Tensor:
    """Gather by messages between two ranks: in each step, a rank passes on what it has, which doubles."""
    ranks, rank, have = group.size(), group.rank(), 1
    messages = message.new_empty(ranks, len(message))  # beginning with that of this rank
    messages[0] = message
    while have < ranks:
        some = min(have, ranks - have)
        ahead, behind = (rank + have) % ranks, (rank - have) % ranks
        arriving = distributed.irecv(messages[have : have + some], group=group, group_src=ahead, tag=_TAG)
        leaving = distributed.isend(messages[:some], group=group, group_dst=behind, tag=_TAG)
        for work in (arriving, leaving):
            awaited(work, messages)()
        have += some
    return messages.roll(rank, 0)


def _unlike_the_first(messages: Tensor) -> tuple[Tensor, list[bool], list[Tensor]]:
    """Return the first message, whether each rank sent the same one (most do), and the messages of the others."""
    alike = (messages == messages[0]).all(1)
    return messages[0], alike.tolist(), list(messages[~alike])


def unanswered(mine: Description) -> str:
    """Return the error text for the case that the other ranks sent no description."""
    return (
        f"{mine.call} of a masked tensor ({', '.join(mine.tensors) or 'none on this rank'}): the other ranks did not "
        "describe their tensors in time. A rank that calls it with plain tensors only does not take part: make the "
        "tensor masked on every rank, masked_dispatch.as_masked_tensor(x)."
    )


def check(group: distributed.ProcessGroup, everyone: Sequence[Description]) -> None:
    """Raise the same error on every rank if the descriptions do not match."""
    ranks = distributed.get_process_group_ranks(group)
    first = everyone[0]
    check_problems(ranks, everyone)
    if any(d.format != first.format or d.call != first.call for d in everyone):
        raise ValueError(ranks_differ(ranks, everyone))
    if first.expected is not None:
        check_pairs(ranks, everyone)
    elif any(d.tensors != first.tensors for d in everyone):
        raise ValueError(ranks_differ(ranks, everyone))
    else:
        sending = [(rank, d) for rank, d in zip(ranks, everyone, strict=True) if d.extents is not None]
        if any(knowledge(d) != knowledge(sending[0][1]) for _, d in sending):
            raise ValueError(extents_differ(sending))


def check_problems(ranks: Sequence[int], everyone: Sequence[Description]) -> None:
    """Raise if one of these ranks cannot take part."""
    for rank, description in zip(ranks, everyone, strict=True):
        if description.problem is not None:
            raise MaskedSemanticsError(f"{description.call} on rank {rank}: {description.problem}")


def knowledge(description: Description) -> list[Any]:
    """Return what a rank knows of its extents and all ranks have to know alike."""
    of = compared_apart if description.apart else compared
    found = [of(statement) for statement in description.extents or ()]
    return found if any(found) else []


def check_pairs(ranks: Sequence[int], everyone: Sequence[Description]) -> None:
    """Raise if a rank sends a tensor that its receiver does not expect."""
    for i, sender in enumerate(everyone):
        for j, receiver in enumerate(everyone):
            sent, expected = sender.tensors[j], (receiver.expected or ())[i]
            if sent != expected:
                raise ValueError(
                    f"{sender.call}: rank {ranks[i]} sends {sent} to rank {ranks[j]}, which expects {expected}"
                )


def ranks_differ(ranks: Sequence[int], everyone: Sequence[Description]) -> str:
    """Return an error text that lists the tensors of each rank."""
    each = of_each((rank, sentence(d, everyone[0])) for rank, d in zip(ranks, everyone, strict=True))
    return (
        f"{everyone[0].call}: the ranks of the group have different tensors: {each}. They need the same dtype, shape "
        "and storage, and the same version of this library."
    )


def extents_differ(sending: Sequence[tuple[int, Description]]) -> str:
    """Return an error text that lists what the ranks know of their extents."""
    first = sending[0][1]
    tensors = ", ".join(first.tensors)
    each = of_each((rank, f"has {tensors} {', '.join(map(in_words, d.extents or (None,)))}") for rank, d in sending)
    return (
        f"{first.call}: the ranks of the group know differently which positions of their tensors are there: {each}. "
        "Pad their batches alike, masked_dispatch.padded; or pass x.without_extent(), in which padding counts as "
        "missing, on every rank."
    )


def sentence(description: Description, first: Description) -> str:
    """Describe a rank's tensors, and its call if it differs from the first rank's."""
    has = f"has {', '.join(description.tensors) or 'nothing'}"
    if description.call != first.call:
        has = f"calls {description.call} and {has}"
    return has if description.format == FORMAT else f"{has} (message format {description.format}, here {FORMAT})"


def of_each(texts: Iterable[tuple[int, str]]) -> str:
    """Say what is said of each rank, of those of which the same is said together."""
    with_it: dict[str, list[int]] = {}
    for rank, text in texts:
        with_it.setdefault(text, []).append(rank)
    return "; ".join(f"{named(ranks)} {text}" for text, ranks in with_it.items())


def named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
