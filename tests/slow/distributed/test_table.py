"""Every function that takes tensors, in four storages and each way of calling it, in 2 and 4 processes; operators of
torch's database on distributed tensors.
"""

from __future__ import annotations

import functools

import pytest

import operators_of_ranks
from process_groups import run_checks
from public_collectives import TESTED
from table_of_collectives import CASES, CHECKS

OTHERS = {"send", "recv", "isend", "irecv", "batch_isend_irecv"}


@functools.cache
def in_processes(module: str, ranks: int) -> dict[str, dict[int, str | None]]:
    return run_checks(module, ranks)


def test_every_function_is_in_the_table() -> None:
    assert {name for name in TESTED if "object" not in name} == set(CASES) | OTHERS


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", CHECKS)
def test_collectives(name: str, ranks: int) -> None:
    failures = in_processes("table_of_collectives", ranks)[name]
    assert {rank: failure for rank, failure in failures.items() if failure} == {}


@pytest.mark.parametrize("name", operators_of_ranks.CHECKS)
def test_operators_on_distributed_tensors(name: str) -> None:
    failures = in_processes("operators_of_ranks", 2)[name]
    assert {rank: failure for rank, failure in failures.items() if failure} == {}
