"""Collectives of masked tensors among four processes, which are started once (tests/helpers/slow_collectives.py)."""

from __future__ import annotations

import pytest

import slow_collectives
from process_groups import run_checks

Failures = dict[str, dict[int, "str | None"]]


@pytest.fixture(scope="module")
def in_four_processes() -> Failures:
    return run_checks("slow_collectives", 4)


@pytest.mark.parametrize("name", slow_collectives.CHECKS)
def test_four_processes(name: str, in_four_processes: Failures) -> None:
    assert {rank: failure for rank, failure in in_four_processes[name].items() if failure} == {}
