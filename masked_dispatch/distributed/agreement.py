"""Before masked tensors travel, every rank of the group learns what the others bring.

The ranks exchange a short description each (an all_gather of fixed size). If they do not fit together, or one of them
cannot take part, all raise the same error, which says which rank has what; only then does data move. A rank that comes
with plain tensors alone calls torch's own collective and never describes anything: the others raise within the time
limit of the group.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, distributed

from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from op_registry import MaskedSemanticsError

# Bytes of a description: its length, the text, zeros. A longer one is sent in a second message.
HEADER = 512
_LENGTH = 4
# Descriptions of another format come from another version of this library.
FORMAT = 3


@dataclass(frozen=True)
class Description:
    """What a rank brings to a collective.

    call     the collective, with its reduction or root: equal on all ranks
    tensors  dtype, shape and storage: equal on all ranks, except where the call says what belongs together
    partial  whether something is invalid, so that masks have to travel
    problem  why this rank cannot take part, if it cannot
    expected for an all_to_all: what this rank expects from each; `tensors` is then what it sends to each
    entries  how many entries each tensor that is sent stores, if they are stored sparsely
    mask     a digest of the mask of what is reduced, where it is known
    """

    call: str
    tensors: tuple[str, ...]
    partial: bool = False
    problem: str | None = None
    expected: tuple[str, ...] | None = None
    entries: tuple[int, ...] = ()
    mask: str | None = None
    format: int = FORMAT


def described(tensor: Tensor) -> str:
    """dtype, shape and storage of a tensor; a plain one is stored like a dense masked one."""
    storage = f", stored as {storage_of(tensor)}" if isinstance(tensor, SparseMaskedTensor) else ""
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}{storage}"


def storage_of(tensor: SparseMaskedTensor) -> str:
    """A sparse layout with all that has to be equal for tensors to have entries of one form."""
    pattern = tensor._pattern
    blocks = f" in blocks of {pattern.block}" if pattern.block else ""
    dense = f" with {pattern.ndim} sparse dimensions" if pattern.ndim < tensor.ndim else ""
    return f"{tensor.storage_layout}{blocks}{dense}"


def encoded(description: Description, size: int = HEADER) -> Tensor:
    """A description as `size` bytes, cut off if it is longer; its length, which comes first, is the full one."""
    text = json.dumps(asdict(description)).encode()
    message = len(text).to_bytes(_LENGTH, "little") + text
    return torch.frombuffer(bytearray(message[:size].ljust(size, b"\0")), dtype=torch.uint8)


def length_of(message: Tensor) -> int:
    """Bytes that a whole message needs."""
    return _LENGTH + int.from_bytes(bytes(message[:_LENGTH].tolist()), "little")


def decoded(message: Tensor) -> Description:
    text = bytes(message[_LENGTH : length_of(message)].tolist()).decode()
    fields = json.loads(text)
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return Description(**{**fields, **lists})


def agree(group: distributed.ProcessGroup, mine: Description, device: torch.device) -> list[Description]:
    """The descriptions of all ranks of the group, in the order of their ranks; the same error on all if some differ.

    Waits for all ranks, in an asynchronous collective too.
    """
    everyone = exchange(group, mine, device)
    check(group, everyone)
    return everyone


def agree_that_all_are_alike(group: distributed.ProcessGroup, mine: Description, device: torch.device) -> None:
    """The same where nothing may differ, with as many bytes for any number of ranks.

    A rank that took part with plain tensors alone would be in an all_reduce too, so this is for calls that are always
    the library's own.
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
    """The descriptions of all ranks, unchecked."""
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
    """Refuse a device on which nothing can be said: there the other ranks are not to blame."""
    if device.type == "meta":
        raise MaskedSemanticsError(
            f"{mine.call} of a masked tensor ({', '.join(mine.tensors)}) on the device meta, where a tensor has no "
            "values and ranks cannot tell each other what they bring: move it to a device, torch.empty_like(x, "
            "device='cpu'), or leave the call out where shapes alone are wanted"
        )


def _gathered(group: distributed.ProcessGroup, message: Tensor, device: torch.device) -> Tensor:
    """A row for each rank."""
    messages = torch.empty(group.size() * len(message), dtype=torch.uint8, device=device)
    distributed.all_gather_single(messages, message.to(device), group=group)
    return messages.cpu().view(group.size(), -1)


def _unlike_the_first(messages: Tensor) -> tuple[Tensor, list[bool], list[Tensor]]:
    """The first message, which ranks have the same, as mostly all have, and the messages of the others."""
    alike = (messages == messages[0]).all(1)
    return messages[0], alike.tolist(), list(messages[~alike])


def unanswered(mine: Description) -> str:
    """The other ranks did not say what they bring."""
    return (
        f"{mine.call} of a masked tensor ({', '.join(mine.tensors) or 'none on this rank'}): the other ranks did not "
        "say in time what they bring. A rank that calls it with plain tensors alone does not take part: make the "
        "tensor masked on every rank, masked_dispatch.as_masked_tensor(x)."
    )


def check(group: distributed.ProcessGroup, everyone: Sequence[Description]) -> None:
    """Raise, on every rank alike, if the descriptions do not fit together."""
    ranks = distributed.get_process_group_ranks(group)
    first = everyone[0]
    for rank, description in zip(ranks, everyone, strict=True):
        if description.problem is not None:
            raise MaskedSemanticsError(f"{description.call} on rank {rank}: {description.problem}")
    if any(d.format != first.format or d.call != first.call for d in everyone):
        raise ValueError(ranks_differ(ranks, everyone))
    if first.expected is not None:
        check_pairs(ranks, everyone)
    elif any(d.tensors != first.tensors for d in everyone):
        raise ValueError(ranks_differ(ranks, everyone))


def check_pairs(ranks: Sequence[int], everyone: Sequence[Description]) -> None:
    """Raise if a rank sends to another what that one does not expect."""
    for i, sender in enumerate(everyone):
        for j, receiver in enumerate(everyone):
            sent, expected = sender.tensors[j], (receiver.expected or ())[i]
            if sent != expected:
                raise ValueError(
                    f"{sender.call}: rank {ranks[i]} sends {sent} to rank {ranks[j]}, which expects {expected}"
                )


def ranks_differ(ranks: Sequence[int], everyone: Sequence[Description]) -> str:
    """Which rank has what."""
    with_it: dict[str, list[int]] = {}
    for rank, description in zip(ranks, everyone, strict=True):
        with_it.setdefault(sentence(description, everyone[0]), []).append(rank)
    parts = [f"{named(found)} {has}" for has, found in with_it.items()]
    return (
        f"{everyone[0].call}: the ranks of the group bring different tensors: {'; '.join(parts)}. They need one dtype, "
        "shape and storage, and the same version of this library."
    )


def sentence(description: Description, first: Description) -> str:
    """What a rank brings; the call too if that is not the first rank's."""
    has = f"has {', '.join(description.tensors) or 'nothing'}"
    if description.call != first.call:
        has = f"calls {description.call} and {has}"
    return has if description.format == FORMAT else f"{has} (message format {description.format}, here {FORMAT})"


def named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
