"""docs/results/compiled.md: each way to compile a step has the results of eager, in the graphs that the page counts."""

from __future__ import annotations

import pytest

from compiled_habits import HABITS, PAGE, SLOW, row
from repository import ROOT

TEXT = (ROOT / "docs/results/compiled.md").read_text("utf-8")


def test_the_page_has_each_habit() -> None:
    assert TEXT.startswith(PAGE)
    assert len(TEXT.removeprefix(PAGE).strip().splitlines()) == len(HABITS) + len(SLOW) + 2


@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # Dynamo's, of profilers
@pytest.mark.parametrize("habit", HABITS)
def test_a_habit_is_as_the_page_says(habit: str) -> None:
    assert row(habit) in TEXT.splitlines()
