"""Collectives of padded batches, in two processes."""

from __future__ import annotations

import pytest

from padded_collectives import CHECKS
from process_groups import run_checks

Failures = dict[str, dict[int, str | None]]


@pytest.fixture(scope="module")
def of_checks() -> Failures:
    return run_checks("padded_collectives", 2)


@pytest.mark.parametrize("name", CHECKS)
def test_padded_batches_between_ranks(name: str, of_checks: Failures) -> None:
    assert {rank: failure for rank, failure in of_checks[name].items() if failure} == {}
