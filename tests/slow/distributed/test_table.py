"""Every function that takes tensors, in each storage and each way of calling it, in 2 and 4 processes; operators of
torch's database on distributed tensors.
"""

from __future__ import annotations

import pytest

import operators_of_ranks
from process_groups import run_checks
from table_of_collectives import CHECKS

Failures = dict[str, dict[int, "str | None"]]


@pytest.fixture(scope="module", params=[2, 4])
def of_functions(request: pytest.FixtureRequest) -> Failures:
    return run_checks("table_of_collectives", request.param)


@pytest.fixture(scope="module")
def of_operators() -> Failures:
    return run_checks("operators_of_ranks", 2)


@pytest.mark.parametrize("name", CHECKS)
def test_collectives(name: str, of_functions: Failures) -> None:
    assert {rank: failure for rank, failure in of_functions[name].items() if failure} == {}


@pytest.mark.parametrize("name", operators_of_ranks.CHECKS)
def test_operators_on_distributed_tensors(name: str, of_operators: Failures) -> None:
    assert {rank: failure for rank, failure in of_operators[name].items() if failure} == {}
