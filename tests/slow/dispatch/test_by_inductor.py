"""Compiled by inductor: the habits of docs/results/compiled.md, pooling with its gradients, and queries."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from cases_of_pooling import CASES, Pool, run
from compiled_habits import SLOW, row
from compiled_regions import masked, same
from repository import ROOT

TEXT = (ROOT / "docs/results/compiled.md").read_text("utf-8")
fresh_compiler = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*:UserWarning")  # torch's own, in export and in Dynamo
@pytest.mark.parametrize("habit", SLOW)
def test_a_habit_is_as_the_page_says(habit: str) -> None:
    assert row(habit) in TEXT.splitlines()


@fresh_compiler
@pytest.mark.parametrize(("n", "pool", "meaning"), CASES)
def test_pooling(n: int, pool: Pool, meaning: str) -> None:
    found, expected = run(torch.compile(pool), n, meaning), run(pool, n, meaning)
    for mine, wanted in zip(found, expected, strict=True):
        assert torch.equal(mine.get_mask(), wanted.get_mask())
        assert_close(mine.to_tensor(0), wanted.to_tensor(0))


@fresh_compiler
def test_queries_of_which_values_there_are() -> None:
    function = torch.compile(lambda x: x.round().unique(return_counts=True), fullgraph=True)
    for _ in range(2):
        x = masked()
        same(function(x), x.round().unique(return_counts=True))
