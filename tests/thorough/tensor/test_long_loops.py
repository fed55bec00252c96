"""A step of a loop costs the same however many came before: in calls, and in the depth of calls that read its result.

A tensor that refers to those before it would be read by a recursion that grows with the loop, and ends in an error. (A
chain of views takes torch itself longer with each view, of any subclass of its tensors: those calls are not Python's.)
"""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import masked_dispatch as md

THERE = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]).bool()
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]]).bool()
KINDS: dict[str, Callable[[], md.MaskedTensor]] = {
    "holes": lambda: md.masked_tensor(torch.ones(3, 4), MASK),
    "padding": lambda: md.from_lengths(torch.ones(3, 4), torch.tensor([4, 2, 3])),
    "holes and padding": lambda: md.padded(md.masked_tensor(torch.ones(3, 4), MASK), THERE),
}


def assign(y: Tensor, value: Any) -> Tensor:
    y[:, 0] = value
    return y


def multiplied(y: Tensor) -> Tensor:
    y[:, 1:].mul_(1)
    return y


STEPS: dict[str, Callable[[Any], Tensor]] = {
    "view": lambda y: y[:],
    "turned": lambda y: y.mT.mT,
    "as columns": lambda y: y.unsqueeze(1).squeeze(1),
    "in place": lambda y: y.add_(1),
    "a part in place": multiplied,
    "assigned": lambda y: assign(y, 1.0),
    "assigned a part": lambda y: assign(y, y[:, 1].clone()),
    "added": lambda y: y + 1,
    "added to itself": lambda y: y * 0.5 + y * 0.5,
    "centred": lambda y: y - y.mean(1, keepdim=True) + 1,
    "columns joined": lambda y: torch.cat([y[:, :2], y[:, 2:]], 1),
    "rows joined": lambda y: torch.cat([y[:1], y[1:]], 0),
    "rows stacked": lambda y: torch.stack([y[b] for b in range(3)]),
    "chosen": lambda y: torch.where(y > 0, y, y + 1),
    "held": lambda y: torch.where(y[:, 1:2].get_mask(), y[:, 1:2], y),
    "cropped": lambda y: F.pad(y[:, :-1], (0, 1)),
    "windows": lambda y: F.avg_pool1d(y[:, None], 3, 1, 1)[:, 0],
    "gathered": lambda y: y.gather(1, torch.arange(4).expand(3, 4)),
    "indexed": lambda y: y[torch.arange(3)],
    "turned round": lambda y: y.flip(1),
    "sorted": lambda y: y.sort(1).values,
    "masked": lambda y: y.mask_with(torch.ones(3, 4).bool()),
    "masked alike": lambda y: (y + 1).mask_like(y),
    "padded": lambda y: md.padded(y.without_extent(), THERE),
    "detached": lambda y: y.detach(),
    "cloned": lambda y: y.clone(),
    "copied": copy.deepcopy,
    "pickled": lambda y: pickle.loads(pickle.dumps(y)),
    "stored": lambda y: y.to_sparse_csr().to_dense(),
}
CUT = {"detached", "copied", "pickled"}  # no gradient passes them


class Calls:
    """Counts Python's calls in a block, and how deep they are nested."""

    def __init__(self) -> None:
        self.number = self.depth = self.deepest = 0

    def __enter__(self) -> Calls:
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            self.number += 1
            self.depth += 1
            self.deepest = max(self.deepest, self.depth)
        elif event == "return":
            self.depth -= 1


def read(y: md.MaskedTensor) -> None:
    y.get_mask(), y.extent, repr(y)
    plain = y.detach()
    copy.deepcopy(plain)
    pickle.dumps(plain)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STEPS)
def test_a_loop_is_linear(name: str, kind: str, grad: bool) -> None:
    if grad and name in CUT:
        pytest.skip("it cuts the graph")
    step = STEPS[name]
    x = KINDS[kind]().requires_grad_(grad)
    y = x * 1 if grad else x
    counted = []
    for number in (25, 25, 150):  # (the first meets what is computed once)
        with Calls() as steps:
            for _ in range(number):
                y = step(y)
        with Calls() as reading:
            read(y)
        counted.append((steps.number / number, reading.number, reading.deepest))
    _, (once, calls, depth), (later, more, deeper) = counted
    assert later <= 1.1 * once + 2
    assert more <= 1.5 * calls + 600  # (some booleans wait for those that they are computed from, but not for many)
    assert deeper <= depth + 75
    if grad:
        with Calls() as backward:
            md.sum(y).to_tensor(0.0).backward()
        assert x.grad is not None
        assert backward.deepest < 75


LONG = (
    "view",
    "in place",
    "assigned",
    "added",
    "columns joined",
    "chosen",
    "held",
    "detached",
    "turned round",
    "masked alike",
)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", LONG)
def test_three_thousand_steps(name: str, grad: bool) -> None:
    x = KINDS["holes and padding"]().requires_grad_(grad)
    y = x * 1 if grad else x
    for _ in range(3000):
        y = STEPS[name](y)
    read(y)
    if grad and name not in CUT:
        md.sum(y).to_tensor(0.0).backward()
        assert torch.equal(x.grad.get_mask(), MASK)
