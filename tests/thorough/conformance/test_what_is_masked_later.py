"""The law "later" on every entry of torch's operator database, in two storages that are far apart."""

from __future__ import annotations

import pytest

from op_registry.conformance.trials import Settings, run_operator
from parts_of_the_database import asked_for, entries, failures

STORED = Settings(laws=("later",), most=2, masks=("half",), also_stored=("csr", "packed"), dense=False)


@pytest.mark.parametrize("entry", asked_for(entries(), "CONFORMANCE_SLICE", "0/1"))
def test_nothing_comes_back(entry: str) -> None:
    report = run_operator(entry, STORED)
    assert not report.failures, failures(report)
