"""How many Python functions a small eager call runs, and which operators: time would vary with the machine."""

from __future__ import annotations

import gc
import json
import subprocess
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


def python_calls(call: Callable[[Tensor], object], x: Tensor) -> list[str]:
    """The Python functions that `call` runs, itself left out."""
    names: list[str] = []

    def see(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            names.append(frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        call(x)
    finally:
        sys.setprofile(before)
    return names[1:]


def functions_of_calls() -> dict[str, list[str]]:
    """Those of each call's second run."""
    gc.disable()
    found = {}
    for name, (call, _) in CALLS.items():
        x = md.masked_tensor(DATA, MASK)
        call(x)
        found[name] = python_calls(call, x)
    return found


@pytest.fixture(scope="module")
def functions() -> dict[str, list[str]]:
    """In a new process: an operator that a test has overlaid looks for its rule at each call from then on."""
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", CALLS)
def test_a_small_call_runs_few_python_functions(name: str, functions: dict[str, list[str]]) -> None:
    assert len(functions[name]) <= CALLS[name][1], functions[name]


def test_what_is_found_out_about_a_new_mask() -> None:
    """Whether anything is valid, and the mask in the data's dtype, which selects; nothing is counted."""
    md.masked_tensor(DATA, MASK).sum()
    x = md.masked_tensor(DATA, MASK)
    with profile(acc_events=True) as seen:
        x.sum()
    ran = [e.name for e in seen.events() if e.cpu_parent is not None and e.cpu_parent.cpu_parent is None]
    assert ran == ["aten::amax", "aten::to", "aten::threshold_backward", "aten::sum"]


if __name__ == "__main__":
    print(json.dumps(functions_of_calls()))
