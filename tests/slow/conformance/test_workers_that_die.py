"""An operator that crashes or hangs costs its own report alone: the runner starts another process."""

from __future__ import annotations

import pytest

from op_registry.conformance import trials
from op_registry.conformance.trials import Settings


@pytest.mark.parametrize(
    "operator, timeout, says",
    [("sin", 100.0, "the process died with exit code 139"), ("tan", 5.0, "not finished after 5 s")],
)
def test_an_operator_that_takes_its_worker_down(operator: str, timeout: float, says: str) -> None:
    settings = Settings(subject="misbehaving_subjects:dies_of_sines", laws=("P2",), most=1, masks=("half",))
    reports = trials.run(["cos", operator, "exp"], settings, workers=1, timeout=timeout)
    assert [bool(r.failures) for r in reports] == [False, True, False]
    (lost,) = reports[1].failures
    assert lost.message == says
    assert lost.repro.startswith(f"python -m op_registry check --op {operator} --law P2 --sample 0 --mask half")
