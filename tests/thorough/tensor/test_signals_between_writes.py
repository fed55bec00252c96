"""An exception of a signal's handler comes between any two steps: whatever it stops, nothing invalid becomes valid."""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from masked_dispatch.dispatch.kernel_table import kernel_table
from masked_dispatch.tensor import mask_sharing
from masked_dispatch.tensor.memory import lock_of

NAN, N = float("nan"), 64


class Stopped(Exception):
    pass


def checkered(offset: int) -> Tensor:
    return (torch.arange(N) + offset) % 3 > 0


def hidden(mask: Tensor, value: float) -> md.MaskedTensor:
    """NaN wherever it is invalid."""
    return md.masked_tensor(torch.where(mask, value, NAN), mask)


# Each of a state in which all that is valid is a number.
STARTS: dict[str, Callable[[], Any]] = {
    "no mask": lambda: md.as_masked_tensor(torch.ones(N)),
    "a mask": lambda: hidden(checkered(0), 1.0),
    "a view": lambda: hidden(torch.cat([checkered(0)] * 2), 1.0)[N // 2 : -N // 2],
    "a view of no mask": lambda: md.as_masked_tensor(torch.ones(2 * N))[N:],
    "coo": lambda: hidden(checkered(0), 1.0).to_sparse(),
    "shared": lambda: hidden(checkered(0), 1.0).share_memory_(),
    "coo, shared": lambda: hidden(torch.ones(N) > 0, 1.0).to_sparse().share_memory_(),
}
WRITES: dict[str, Callable[[Any, Any], object]] = {
    "copy_": lambda x, y: x.copy_(y),
    "add_": lambda x, y: x.add_(y),
    "x[1:] = y": lambda x, y: x.__setitem__(slice(1, None), y[1:]),
    "where out": lambda x, y: torch.where(checkered(2), y, y, out=x),
    "fill_": lambda x, y: x.fill_(3.0),
    "copy_ and back": lambda x, y: (x.copy_(y), x.fill_(2.0), x.copy_(y)),
}


def all_that_is_valid_is_a_number(x: Any) -> bool:
    return not bool(x.compressed().isnan().any())


class StopsAfter:
    """Raises before a line of the library, after so many of them, as a signal's handler may.

    It lets a line that begins with `with` pass, which a tracer is also told of before the block is left. An exception
    there would leave a lock held, but Python runs no handler between the block and the call of `__exit__`.
    """

    def __init__(self, steps: int) -> None:
        self.left = steps

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_globals.get("__name__", "").startswith(("masked_dispatch", "op_registry")):
            return None
        if event == "line":
            self.left -= 1
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            if self.left < 0 and not line.lstrip().startswith("with "):
                sys.settrace(None)
                raise Stopped
        return self


def stopped_after(steps: int, work: Callable[[], object]) -> bool:
    """Whether the work was stopped, after so many steps."""
    tracer = StopsAfter(steps)
    sys.settrace(tracer)
    try:
        work()
    except Stopped:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("write", WRITES)
def test_wherever_it_is_stopped_nothing_invalid_becomes_valid(start: str, write: str) -> None:
    """Also not in what had the mask before, and not after the next write, which nothing stops."""
    # Once without being stopped: what is done at a first call alone is not asked about each time.
    WRITES[write](STARTS[start](), hidden(checkered(1), 5.0))
    steps = 0
    while True:
        x, y = STARTS[start](), hidden(checkered(1), 5.0)
        before = x * 1
        if start == "coo, shared":
            y = y.to_sparse()
        stopped = stopped_after(steps, lambda x=x, y=y: WRITES[write](x, y))  # type: ignore[misc]
        assert all_that_is_valid_is_a_number(x), steps
        assert all_that_is_valid_is_a_number(before), steps
        locks = (lock_of(x), mask_sharing._founding.here, kernel_table._lock.here)
        assert not any(map(held_elsewhere, locks)), steps
        kept = x * 1
        x[:3] = y[:3]
        x.mul_(2)
        assert all_that_is_valid_is_a_number(x), steps
        assert all_that_is_valid_is_a_number(kept), steps
        if not stopped:
            break
        steps += 1 + steps // 15
    assert steps > 10


def held_elsewhere(lock: Any) -> bool:
    """Whether another thread finds it held, after the work."""
    found: list[bool] = []

    def look() -> None:
        found.append(lock.acquire(blocking=False))
        if found[0]:
            lock.release()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return not found[0]
