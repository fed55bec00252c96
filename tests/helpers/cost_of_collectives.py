"""What an all_reduce of a dense masked tensor costs beside torch's: bytes sent and memory written, both counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed
from torch.utils._python_dispatch import TorchDispatchMode

import masked_dispatch as md
from masked_dispatch.distributed.fields import width_for
from masked_dispatch.distributed.transport import Eager
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


def all_reduced(dtype: torch.dtype) -> tuple[float, float]:
    """Bytes that are sent, and bytes of new memory, both as multiples of the bytes of the data."""
    x: Any = md.masked_tensor(torch.ones(ELEMENTS, dtype=dtype), torch.rand(ELEMENTS) < 0.7)
    sent, send = [], Eager.all_reduce

    def counting(self: Eager, data: Tensor, op: str) -> Callable[[], Tensor]:
        sent.append(data.nbytes)
        return send(self, data, op)

    with mock.patch.object(Eager, "all_reduce", counting), Written() as written:
        distributed.all_reduce(x)
    return sum(sent) / (ELEMENTS * dtype.itemsize), written.bytes / (ELEMENTS * dtype.itemsize)


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


CHECKS["cost of all_reduce: bytes sent, and memory"] = costs
