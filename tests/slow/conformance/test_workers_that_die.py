"""An operator that crashes or hangs costs its own report alone: the runner starts another process."""

from __future__ import annotations

import pytest

from op_registry.conformance import trials
from op_registry.conformance.trials import Settings


@pytest.mark.parametrize(
    "subject, says", [("crashes", "the process died with exit code 139"), ("hangs", "not finished after 5 s")]
)
def test_an_operator_that_takes_its_worker_down(subject: str, says: str) -> None:
    settings = Settings(subject=f"misbehaving_subjects:{subject}", laws=("P2",), most=1, masks=("half",))
    reports = trials.run(["cos", "sin", "exp"], settings, workers=1, timeout=5.0 if subject == "hangs" else 100.0)
    assert [bool(r.failures) for r in reports] == [False, True, False]
    (lost,) = reports[1].failures
    assert lost.message == says
    assert lost.repro.startswith("python -m op_registry check --op sin --law P2 --sample 0 --mask half")
