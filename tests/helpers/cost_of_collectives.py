"""What an all_reduce of a dense masked tensor costs beside torch's: bytes sent and memory written, both counted.

What saves it, masks that are not sent again and data that is sent in pieces, changes no result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed
from torch.utils._python_dispatch import TorchDispatchMode

import masked_dispatch as md
from masked_dispatch.distributed import records
from masked_dispatch.distributed.messages import Eager, width_for
from process_groups import Check

CHECKS: dict[str, Check] = {}
ELEMENTS = 1 << 21
# What is smaller stays in the cache: slices that are filled, and packed masks.
LARGE = 1 << 20


class Written(TorchDispatchMode):
    """Counts the bytes of large results that are not in the memory of an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {a.untyped_storage().data_ptr() for a in args if type(a) is Tensor}
        if type(result) is Tensor and result.nbytes >= LARGE and result.untyped_storage().data_ptr() not in given:
            self.bytes += result.nbytes
        return result


def sent_in_bytes(x: Any, op: Any = distributed.ReduceOp.SUM) -> int:
    sent, send = [], Eager.all_reduce

    def counting(self: Eager, data: Tensor, op: str) -> Callable[[], Tensor]:
        sent.append(data.nbytes)
        return send(self, data, op)

    with mock.patch.object(Eager, "all_reduce", counting):
        distributed.all_reduce(x, op)
    return sum(sent)


@contextmanager
def gathered_messages() -> Iterator[list[int]]:
    """The bytes of the messages that are gathered from all ranks inside."""
    sent: list[int] = []
    gather = distributed.all_gather_single

    def counting(output: Tensor, message: Tensor, **options: Any) -> Any:
        sent.append(message.nbytes)
        return gather(output, message, **options)

    with mock.patch.object(distributed, "all_gather_single", counting):
        yield sent


def all_reduced(dtype: torch.dtype) -> tuple[float, float]:
    """Bytes that are sent, and bytes of new memory, both as multiples of the bytes of the data."""
    x: Any = md.masked_tensor(torch.ones(ELEMENTS, dtype=dtype), torch.rand(ELEMENTS) < 0.7)
    with Written() as written:
        sent = sent_in_bytes(x)
    return sent / (ELEMENTS * dtype.itemsize), written.bytes / (ELEMENTS * dtype.itemsize)


def costs(rank: int, ranks: int) -> None:
    mask = width_for(ranks) / 8  # bytes to an element
    sent, written = all_reduced(torch.float32)
    assert sent == 1 + mask / 4
    # No copy of the data, only masks: a byte to an element before they are sent, and a byte after.
    assert 0.25 <= written <= (0.5 if ranks < 4 else 1.5), written
    sent, written = all_reduced(torch.float16)
    assert sent == 2 + mask / 2
    # The sum in float32, and masks as before.
    assert 2.5 <= written <= (3 if ranks < 4 else 5), written


def masks_that_stay(rank: int, ranks: int) -> None:
    data, mask = torch.arange(16.0) + rank, torch.arange(16) % 3 > 0
    parameter: Any = md.masked_tensor(data, mask)
    fields = width_for(ranks) * 16 // 8
    for op in (distributed.ReduceOp.SUM, distributed.ReduceOp.AVG, distributed.ReduceOp.MAX):
        expected = {"SUM": data * ranks - rank * ranks + sum(range(ranks)), "MAX": data - rank + ranks - 1}
        expected["AVG"] = expected["SUM"] / ranks
        for time in range(3):
            x = parameter + 0
            once = op == distributed.ReduceOp.SUM and time == 0
            assert sent_in_bytes(x, op) == 64 + (fields if once else 0), (op, time)
            md.testing.assert_close(x, md.as_masked_tensor(expected[op.name], mask))
    # One rank has another mask, which has travelled too; then the same as the others, in the same memory.
    other: Any = md.masked_tensor(data, mask.roll(rank))
    for _ in range(2):
        x = other + 0
        assert sent_in_bytes(x) == 64 + fields
        assert x.get_mask().equal(torch.stack([mask.roll(r) for r in range(ranks)]).any(0))


def pieces(rank: int, ranks: int) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int32):
        for op in (distributed.ReduceOp.SUM, distributed.ReduceOp.PRODUCT, distributed.ReduceOp.MIN):
            data = torch.arange(1, 24).view(23, 1).expand(23, 3).to(dtype) + rank
            mask = (torch.arange(69) + rank).view(23, 3) % 4 > 0
            whole, in_pieces = md.masked_tensor(data, mask), md.masked_tensor(data, mask)
            distributed.all_reduce(whole, op)
            with mock.patch.object(records, "PIECE", 10):
                distributed.all_reduce(in_pieces, op)
            md.testing.assert_close(in_pieces, whole, rtol=0, atol=0)
    halves = md.masked_tensor(torch.arange(23.0).half(), torch.arange(23) % 4 > 0)
    with mock.patch.object(records, "PIECE", 10):
        distributed.all_reduce(halves, distributed.ReduceOp.AVG)
    md.testing.assert_close(halves, md.as_masked_tensor(torch.arange(23.0).half(), torch.arange(23) % 4 > 0))


CHECKS["cost of all_reduce: bytes sent, and memory"] = costs
CHECKS["a mask that all ranks have is sent once"] = masks_that_stay
CHECKS["data that is sent in pieces"] = pieces
