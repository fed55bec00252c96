"""Graphs join samples, steps and states as eager calls do, and give library functions what is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import masked_dispatch as md
from comparison import same_extents as same
from masked_dispatch import MaskedSemanticsError, missing

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def batch(*lengths: int) -> Any:
    data = torch.arange(1.0, 4.0 * len(lengths) + 1).view(len(lengths), 4) / 10
    return md.from_lengths(data, torch.tensor(lengths))


torch.manual_seed(0)
FIRST, SECOND, LSTM = nn.GRUCell(1, 2), nn.GRUCell(2, 2), nn.LSTMCell(1, 2)


def states(x: Any) -> list[Any]:
    state, found = torch.zeros(len(x), 2), []
    for step in x.unbind(1):
        state = FIRST(step[:, None], state)
        found.append(state)
    return found


def pairs(x: Any) -> Any:
    state, found = (torch.zeros(len(x), 2), torch.zeros(len(x), 2)), []
    for step in x.unbind(1):
        state = LSTM(step[:, None], state)
        found.append(torch.stack(list(state), 1))
    return torch.stack(found, 1)


def two_layers(x: Any) -> Any:
    state, found = torch.zeros(len(x), 2), []
    for below in states(x):
        state = SECOND(below, state)
        found.append(state)
    return torch.stack(found, 1)


def held(x: Any) -> Any:
    total, totals = torch.zeros(len(x)), []
    for step in x.unbind(1):
        total = torch.where(step.get_mask(), total + step, total)
        totals.append(torch.stack([total, total * 2], 1))
    return torch.stack(totals, 1)


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "rows": lambda x: torch.stack([row * 2 for row in x]),
    "rows unsqueezed": lambda x: torch.cat([row[None].cumsum(1) for row in x]),
    "samples, then steps": lambda x: torch.stack([torch.stack(row.unbind(0)) for row in x.unbind(0)]),
    "steps": lambda x: torch.stack([step * 2 for step in x.unbind(1)], 1),
    "a step and the next": lambda x: torch.stack([x[:, 2] + x[:, 3], x[:, 3] + 0], 1).mean(1),
    "states": lambda x: torch.stack(states(x), 1),
    "a mean of states": lambda x: torch.stack(states(x), 1).mean(1),
    "two states of each step": pairs,
    "two layers": two_layers,
    "two directions": lambda x: torch.stack([states(x)[-1], states(x.flip(1))[-1]], 1),
    "held states": held,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_graph_gives_the_same(name: str) -> None:
    run = torch.compile(FUNCTIONS[name], fullgraph=True, backend="aot_eager")
    for x in (batch(4, 2, 1), batch(1, 4, 0)):
        md.testing.assert_close(run(x), FUNCTIONS[name](x), check_extent=True)


@torch.no_grad()
def test_a_graph_of_one_step_returns_the_last_state_and_does_not_know_the_recurrence() -> None:
    run = torch.compile(FIRST, fullgraph=True, backend="aot_eager")
    x, state, found = batch(4, 2, 1), torch.zeros(3, 2), []
    for step in x.unbind(1):
        state = run(step[:, None], state)
        found.append(state)
    torch.testing.assert_close(state.to_tensor(0.0), states(x)[-1].to_tensor(0.0))
    with pytest.raises(MaskedSemanticsError, match=r"compiled regions have returned .* Compile the whole loop"):
        torch.stack(found, 1)


def test_samples_at_different_places_are_not_summed() -> None:
    x = batch(4, 2, 1)
    left = md.padded(md.masked_tensor(x.to_tensor(0.0).flip(1), x.get_mask().flip(1)), dim=1)
    run = torch.compile(lambda x: torch.stack([row * 1 for row in x]).sum(0), fullgraph=True, backend="aot_eager")
    md.testing.assert_close(run(x), torch.stack(x.unbind(0)).sum(0))
    with pytest.raises(RuntimeError, match="lie at different places along dimension 1"):
        run(left)


# -------------------------------------------------------------------------------------------------- library functions


OF_THE_LIBRARY: dict[str, Callable[[Tensor], Tensor]] = {
    "ffill": lambda x: missing.ffill(x * 2, 1),
    "interpolate": lambda x: missing.interpolate(x * 2, 1),
    "shift": lambda x: missing.shift(x * 2, 1, 1),
    "fillna": lambda x: missing.fillna(x * 2, 9.0),
    "rolling": lambda x: missing.rolling(x * 2, 2, 1, min_count=1).mean(),
    "groups of samples": lambda x: missing.groupby(x * 2, [0, 1], 0, num_groups=2).sum(),
    "skipna": lambda x: md.mean(x * 2, 1, skipna=False),
    "a scan": lambda x: md.cumsum(x * 2, 1, skipna=False),
    "min_count": lambda x: md.sum(x * 2, 1, min_count=0),
}


@pytest.mark.parametrize("side", ["behind", "in front", "between"])
@pytest.mark.parametrize("name", OF_THE_LIBRARY)
def test_library_functions_of_what_a_graph_computes(name: str, side: str) -> None:
    places = {"behind": [1, 1, 0, 0], "in front": [0, 0, 1, 1], "between": [1, 0, 1, 1]}[side]
    there = torch.tensor([[1, 1, 1, 1], places]).bool()
    data = torch.arange(8.0).view(2, 4)
    x = md.padded(md.masked_tensor(data, there & (data != 2)), there, dim=1)
    same(torch.compile(OF_THE_LIBRARY[name], fullgraph=True, backend="aot_eager")(x), OF_THE_LIBRARY[name](x))
