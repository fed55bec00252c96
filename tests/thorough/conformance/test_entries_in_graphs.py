"""P7 on whole entries of the database, compiled."""

from __future__ import annotations

import pytest

from op_registry.conformance.trials import Settings, run_operator

EAGER = "masked_dispatch.conformance_subject:eager"


@pytest.mark.parametrize(
    ("entry", "mode"),
    [("nn_functional_bilinear", "aot_eager"), ("std_mean", "aot_eager_dynamic"), ("linalg_eig", "aot_eager")],
)
def test_entries_compile_as_they_run(entry: str, mode: str) -> None:
    report = run_operator(entry, Settings(subject=EAGER, laws=("P7",), whole_entries=True, modes=(mode,)))
    assert report.counts["P7"] == {"pass": 1}, report
