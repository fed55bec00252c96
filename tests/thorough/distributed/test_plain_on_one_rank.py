"""Collectives that one of two ranks calls with plain tensors alone."""

from __future__ import annotations

import pytest

from plain_on_one_rank import CHECKS
from process_groups import run_checks

Failures = dict[str, dict[int, "str | None"]]


@pytest.fixture(scope="module")
def of_checks() -> Failures:
    return run_checks("plain_on_one_rank", 2)


@pytest.mark.parametrize("name", CHECKS)
def test_masked_ranks_raise_in_time(name: str, of_checks: Failures) -> None:
    assert {rank: failure for rank, failure in of_checks[name].items() if failure} == {}
