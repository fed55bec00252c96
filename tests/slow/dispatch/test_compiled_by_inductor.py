"""docs/results/compiled.md: what inductor compiles, what a second process finds on disk, and exported programs."""

from __future__ import annotations

import pytest

from compiled_habits import SLOW, row
from repository import ROOT

TEXT = (ROOT / "docs/results/compiled.md").read_text("utf-8")


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*:UserWarning")  # torch's own, in export and in Dynamo
@pytest.mark.parametrize("habit", SLOW)
def test_a_habit_is_as_the_page_says(habit: str) -> None:
    assert row(habit) in TEXT.splitlines()
