"""50 training steps in 2 and 4 processes have the losses of one process (tests/helpers/parallel_training.py)."""

from __future__ import annotations

import functools

import pytest

from parallel_training import CHECKS
from process_groups import run_checks


@functools.cache
def in_processes(ranks: int) -> dict[str, dict[int, str | None]]:
    return run_checks("parallel_training", ranks)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", CHECKS)
def test_losses_are_those_of_one_process(name: str, ranks: int) -> None:
    assert {rank: failure for rank, failure in in_processes(ranks)[name].items() if failure} == {}
