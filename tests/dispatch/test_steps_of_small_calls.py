"""How many Python functions a small eager call runs, and which operators: time would vary with the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import pytest
import torch
from torch import Tensor
from torch.profiler import profile

import masked_dispatch as md

DATA = torch.arange(12.0).reshape(3, 4)
MASK = DATA % 3 != 1

# What is called with a masked tensor, and at most how many Python functions run in it, torch's own included. (Where a
# test before has made an overlay with a rule for sum, eleven of them ask which one is in force.)
CALLS: dict[str, tuple[Callable[[Tensor], object], int]] = {
    "neg": (lambda x: -x, 5),
    "sum": (lambda x: x.sum(), 8 + 11),
    "view": (lambda x: x.view(-1), 30),
    "select": (lambda x: x.select(0, 1), 28),
    "transpose": (lambda x: x.transpose(0, 1), 26),
    "a new mask": (lambda _: md.masked_tensor(DATA, MASK), 30),
    "a new mask's sum": (lambda _: md.masked_tensor(DATA, MASK).sum(), 72 + 11),
}


def python_calls(call: Callable[[Tensor], object], x: Tensor) -> int:
    """How many Python functions `call` runs."""
    count = 0

    def see(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        call(x)
    finally:
        sys.setprofile(before)
    return count - 1  # without `call` itself


@pytest.mark.parametrize("name", CALLS)
def test_a_small_call_runs_few_python_functions(name: str) -> None:
    call, most = CALLS[name]
    x = md.masked_tensor(DATA, MASK)
    call(x)
    assert min(python_calls(call, x) for _ in range(5)) <= most  # (the garbage collector may run in one)


def test_what_is_found_out_about_a_new_mask() -> None:
    """Whether anything is valid, and the mask in the data's dtype, which selects; nothing is counted."""
    md.masked_tensor(DATA, MASK).sum()
    x = md.masked_tensor(DATA, MASK)
    with profile(acc_events=True) as seen:
        x.sum()
    ran = [e.name for e in seen.events() if e.cpu_parent is not None and e.cpu_parent.cpu_parent is None]
    assert ran == ["aten::amax", "aten::to", "aten::threshold_backward", "aten::sum"]
