"""Where another operand's mask leaves all results out, nothing comes back: every operator of torch's database."""

from __future__ import annotations

import warnings

import pytest

from op_registry.conformance.masked_later import nothing_comes_back
from op_registry.conformance.samples import database
from op_registry.conformance.subjects import find_subject
from op_registry.conformance.trials import Settings, status_of, trials_of
from op_registry.records.zeros import zeros_verified

FEW = Settings(laws=("P5",), most=2, masks=("half",))


@pytest.mark.parametrize("storage", [None, "csr", "packed"])
def test_nothing_comes_back(storage: str | None) -> None:
    subject, broken, asked = find_subject(None), [], 0
    with warnings.catch_warnings(), zeros_verified():
        warnings.simplefilter("ignore")
        for name, operator in database().items():
            for description, trial in trials_of(operator, "P5", subject, FEW):
                status, message = status_of(lambda trial=trial: nothing_comes_back(trial, storage))  # type: ignore[misc]
                asked += status == "pass"
                if status in ("broken", "error"):
                    broken.append((name, description, message))
    assert broken == []
    assert asked > 900
