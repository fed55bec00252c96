"""50 training steps in 2 and 4 processes have the losses of one process (tests/helpers/parallel_training.py)."""

from __future__ import annotations

import pytest

from parallel_training import CHECKS
from process_groups import run_checks


@pytest.fixture(scope="module", params=[2, 4])
def failures(request: pytest.FixtureRequest) -> dict[str, dict[int, str | None]]:
    return run_checks("parallel_training", request.param)


@pytest.mark.parametrize("name", CHECKS)
def test_losses_are_those_of_one_process(name: str, failures: dict[str, dict[int, str | None]]) -> None:
    assert {rank: failure for rank, failure in failures[name].items() if failure} == {}
