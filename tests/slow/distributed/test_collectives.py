"""Collectives of masked tensors: in processes of their own, which are started once (tests/helpers)."""

from __future__ import annotations

import pytest

from all_collectives import CHECKS
from process_groups import run_checks

Failures = dict[str, dict[int, "str | None"]]


@pytest.fixture(scope="module")
def in_two_processes() -> Failures:
    return run_checks("all_collectives", 2)


@pytest.mark.parametrize("name", CHECKS)
def test_two_processes(name: str, in_two_processes: Failures) -> None:
    assert {rank: failure for rank, failure in in_two_processes[name].items() if failure} == {}
