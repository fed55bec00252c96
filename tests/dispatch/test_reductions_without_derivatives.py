"""Without derivatives a reduction is torch's own on filled data: the rule's result, by few operators."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import pytest
import torch
from torch import Tensor
from torch.profiler import profile

import masked_dispatch as md

SHAPE = (3, 4)
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(),
    "mean of rows": lambda x: x.mean(1),
    "mean of columns, kept": lambda x: x.mean(0, keepdim=True),
    "mean of both": lambda x: x.mean((0, 1)),
    "amax": lambda x: x.amax(1),
    "amin": lambda x: x.amin((0, 1), keepdim=True),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "sum": lambda x: x.sum(0),
}
MASKS = {
    "half": torch.tensor([[True, False, True, True], [False] * 4, [False, True, True, True]]),
    "rows": torch.tensor([[True], [False], [True]]),
    "columns": torch.tensor([[True, True, False, True]]),
    "nothing": torch.zeros(SHAPE, dtype=torch.bool),
    "everything": torch.ones(SHAPE, dtype=torch.bool),
}


def matrix(mask: Tensor, hidden: float, dtype: torch.dtype = torch.float64) -> md.MaskedTensor:
    """A matrix with `hidden` where it is invalid."""
    data = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).mul(8).to(dtype)
    return md.as_masked_tensor(torch.where(mask, data, torch.tensor(hidden).to(dtype)), mask)


# Each reduction under two masks, the second without anything valid, or everything, or half.
@pytest.mark.parametrize(
    "name, mask, hidden",
    [
        *zip(REDUCTIONS, cycle(["half", "rows", "columns"]), cycle([torch.nan, torch.inf, -torch.inf, 0.0])),
        *zip(REDUCTIONS, cycle(["nothing", "half", "everything"]), cycle([torch.inf, torch.nan])),
    ],
)
def test_the_result_is_that_of_the_rule(name: str, mask: str, hidden: float) -> None:
    call, x = REDUCTIONS[name], matrix(MASKS[mask], hidden)
    by_rule = call(x.detach().requires_grad_()).detach()
    for _ in range(2):  # what the first call finds out about the mask, the second knows
        md.testing.assert_close(call(x), by_rule, rtol=0, atol=0)


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("mean", torch.float16),
        ("mean of rows", torch.bfloat16),
        ("amax", torch.int64),
        ("amin", torch.float16),
        ("max", torch.bfloat16),
        ("sum", torch.int64),
        ("sum", torch.bfloat16),
    ],
)
def test_other_dtypes_take_the_general_path(name: str, dtype: torch.dtype) -> None:
    call, x = REDUCTIONS[name], matrix(MASKS["half"], 9.0, dtype)
    found, wide = call(x), call(x.to(torch.float64))
    assert found.dtype is dtype
    md.testing.assert_close(found.to(torch.float64), wide, rtol=1e-2, atol=0)


@pytest.mark.parametrize("name", ["mean", "mean of rows"])
def test_a_mean_of_integers_is_torchs_error(name: str) -> None:
    with pytest.raises(RuntimeError, match="could not infer output dtype"):
        REDUCTIONS[name](matrix(MASKS["half"], 9.0, torch.int64))


@pytest.mark.parametrize("name", ["mean", "amax"])
def test_nothing_valid_and_nothing_there(name: str) -> None:
    """A reduction of no elements is torch's."""
    x = md.masked_tensor(torch.zeros(0, 4), torch.zeros(0, 4, dtype=torch.bool))
    if name == "amax":
        with pytest.raises(IndexError, match="non-zero size"):
            x.amax(0)
    else:
        assert x.mean(0).to_tensor(0.0).isnan().all()


@pytest.mark.parametrize(
    "name, operators", [("mean", {"threshold_backward", "sum", "div"}), ("amax", {"where", "amax"})]
)
def test_what_the_mask_says_is_computed_once(name: str, operators: set[str]) -> None:
    call, x = REDUCTIONS[name], matrix(MASKS["half"], torch.nan)
    call(x)
    with profile(acc_events=True) as seen:
        call(x)
    ran = {event.name.removeprefix("aten::") for event in seen.events() if event.name.startswith("aten::")}
    assert ran & {*operators, "any", "clamp", "eq", "isfinite", "all", "bitwise_and"} == operators


def test_a_mask_that_has_changed_is_not_known() -> None:
    x = md.masked_tensor(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([True, True, False]))
    assert x.mean().item() == 1.5
    x[2] = 6.0
    assert x.mean().item() == 3.0
    assert x.amax().item() == 6.0
