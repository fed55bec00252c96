"""Collectives of masked tensors: in processes of their own, which are started once (tests/helpers)."""

from __future__ import annotations

import pytest

import slow_collectives
from all_collectives import CHECKS
from process_groups import run_checks

Failures = dict[str, dict[int, "str | None"]]


@pytest.fixture(scope="module")
def in_two_processes() -> Failures:
    return run_checks("all_collectives", 2)


@pytest.mark.parametrize("name", CHECKS)
def test_two_processes(name: str, in_two_processes: Failures) -> None:
    assert {rank: failure for rank, failure in in_two_processes[name].items() if failure} == {}


@pytest.fixture(scope="module")
def in_four_processes() -> Failures:
    return run_checks("slow_collectives", 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_collectives.CHECKS)
def test_four_processes(name: str, in_four_processes: Failures) -> None:
    assert {rank: failure for rank, failure in in_four_processes[name].items() if failure} == {}
