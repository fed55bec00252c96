"""Without derivatives a reduction is torch's own on filled data, by few operators.

That its result is the rule's, the laws ask (P2 and P3 of the reductions, which run without derivatives).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.profiler import profile

import masked_dispatch as md

MASK = torch.tensor([[True, False, True, True], [False] * 4, [False, True, True, True]])


@pytest.mark.parametrize("reduce", [lambda x: x.mean(), lambda x: x.mean(1)], ids=["mean", "mean of rows"])
def test_a_mean_of_integers_is_torchs_error(reduce: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(RuntimeError, match="could not infer output dtype"):
        reduce(md.masked_tensor(torch.arange(12).reshape(3, 4), MASK))


def test_a_reduction_of_no_elements_is_torchs() -> None:
    x = md.masked_tensor(torch.zeros(0, 4), torch.zeros(0, 4, dtype=torch.bool))
    assert x.mean(0).to_tensor(0.0).isnan().all()
    with pytest.raises(IndexError, match="non-zero size"):
        x.amax(0)


@pytest.mark.parametrize(
    "name, operators", [("mean", {"threshold_backward", "sum", "div"}), ("amax", {"where", "amax"})]
)
def test_what_the_mask_says_is_computed_once(name: str, operators: set[str]) -> None:
    x = md.as_masked_tensor(torch.where(MASK, torch.randn(3, 4), torch.nan), MASK)
    reduce = {"mean": x.mean, "amax": lambda: x.amax(1)}[name]
    first = reduce()
    with profile(acc_events=True) as seen:
        second = reduce()
    ran = {event.name.removeprefix("aten::") for event in seen.events() if event.name.startswith("aten::")}
    assert ran & {*operators, "any", "clamp", "eq", "isfinite", "all", "bitwise_and"} == operators
    md.testing.assert_close(second, first, rtol=0, atol=0)


def test_a_mask_that_has_changed_is_not_known() -> None:
    x = md.masked_tensor(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([True, True, False]))
    assert x.mean().item() == 1.5
    x[2] = 6.0
    assert x.mean().item() == 3.0
    assert x.amax().item() == 6.0
