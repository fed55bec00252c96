"""P7 on whole entries of the database (``check --tier compiled``): what is compiled, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch._ops import OpOverload

from op_registry import __main__ as command
from op_registry.conformance import find_subject, plain_torch
from op_registry.conformance.gaps import GapTracker
from op_registry.conformance.samples import database
from op_registry.conformance.subject import Records, Subject
from op_registry.conformance.trials import Settings, run_operator, trials_of
from op_registry.conformance.verdict import Outcome, Report
from op_registry.report import conformance
from op_registry.rule import Gap

EAGER = "masked_dispatch.conformance_subject:eager"
WHOLE = Settings(subject=EAGER, laws=("P7",), whole_entries=True)


@pytest.mark.parametrize("entry", ["nn_functional_bilinear", "std_mean", "var_mean"])
def test_an_entry_is_called_whole_and_has_a_gradient(entry: str) -> None:
    ((_, trial),) = trials_of(database()[entry], "P7", find_subject(EAGER), WHOLE)
    assert not isinstance(trial.sample.fn, OpOverload)
    assert plain_torch.derivative(trial.sample).order > 0
    assert all(t.numel() > 3 for t in trial.sample.tensors)


class OverloadsAlone(Records):
    """Has a mode in which Python functions raise, on plain tensors too."""

    laws = (*Records.laws, "P7")

    def modes(self) -> dict[str, Subject]:
        return {"aot_eager": _OverloadsAlone()}


class _OverloadsAlone(Records):
    def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not isinstance(fn, OpOverload):
            raise NotImplementedError("it is written in Python")
        return super().call(fn, *args, **kwargs)


def test_what_does_not_compile_whole_is_compiled_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("op_registry.conformance.trials.find_subject", lambda name: OverloadsAlone())
    report = run_operator("nn_functional_bilinear", Settings(laws=("P7",), whole_entries=True))
    assert report.counts["P7"] == {"not asked": 2, "pass": 1}  # whole under a mask, whole with all valid, in parts
    (reason,) = report.silences["P7"]
    assert reason == "plain torch cannot do it in mode aot_eager either: NotImplementedError: it is written in Python"


OWN = Gap("P7", "why", "dynamic")


def test_a_gap_covers_a_failure() -> None:
    assert GapTracker([OWN]).judged("P7", "float32 dynamic", "broken", "it raises") == ("gap", "why (it raises)")
    assert GapTracker([OWN]).judged("P7", "float32 static", "broken", "it raises") == ("broken", "it raises")


def test_a_gap_that_no_longer_fails_is_reported() -> None:
    gaps = GapTracker([OWN])
    gaps.judged("P7", "float32 dynamic", "pass", "")
    assert gaps.closed() == [OWN]
    gaps.judged("P7", "float32 dynamic", "broken", "it raises")
    assert gaps.closed() == []  # it has failed once


def test_the_summary_has_the_share_the_gaps_and_what_was_not_compared() -> None:
    gap = Outcome("P7", "float32 sample 0 half aot_eager", "gap", "why (it raises)", "python -m …")
    broken = Outcome("P7", "float32 sample 0 half aot_eager", "broken", "it differs", "python -m …")
    silent = {"P7": {"plain torch cannot do it in mode aot_eager either: TypeError": 1}}
    text = conformance.summary(
        [
            Report("exp", {"P7": {"pass": 1}}),
            Report("sin", {"P7": {"pass": 2}}),
            Report("cos", {"P7": {"pass": 1, "gap": 1}}, [gap]),
            Report("tan", {"P7": {"broken": 1}}, [broken]),
            Report("log", {"P7": {"not asked": 1}}, silences=silent),
        ]
    )
    assert (
        "5 operators: 2 right in every trial (50.00 % of 4), 0 refuse some, 1 fail some, 1 have named gaps, "
        "1 had nothing to try"
    ) in text
    assert "P7 compared nothing of 1 (log): plain torch cannot do it in mode aot_eager either" in text
    assert "gap in P7: why (it raises)\n    python -m …" in text


def test_entries_are_drawn_by_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(command.trials, "run", lambda names, settings, **rest: asked.append(names) or [])
    for seed in ("0", "0", "1"):
        arguments = ["check", "--tier", "compiled", "--mode", "inductor_dynamic", "--draw", "5", "--seed", seed]
        assert command.main(arguments) == 0
    assert asked[0] == asked[1] != asked[2]
    assert [len(set(names)) for names in asked] == [5, 5, 5]
    assert set(asked[0]) <= set(database())
