"""P7 on whole entries of the database (``check --tier compiled``): what is compiled, and which failures are torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry import __main__ as command
from op_registry.conformance import find_subject, plain_torch
from op_registry.conformance.gaps import GapTracker
from op_registry.conformance.laws.modes import torch_fails_too
from op_registry.conformance.masks import masking
from op_registry.conformance.sample import Sample
from op_registry.conformance.samples import database
from op_registry.conformance.subject import Records, Subject
from op_registry.conformance.trial import Trial
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


OWN, TORCHS = Gap("P7", "why", "dynamic"), Gap("P7", "why", "dynamic", upstream=True)


@pytest.mark.parametrize(
    ("gap", "theirs", "found"),
    [
        (OWN, None, ("gap", "why (it raises)")),
        (TORCHS, "so does this", ("gap", "why (it raises; torch's own TwoTensor fails too: so does this)")),
        (None, "so does this", ("broken", "it raises; torch's own TwoTensor fails too: so does this")),
        (
            TORCHS,
            None,
            (
                "broken",
                "it raises; named as torch's failure, but torch's own TwoTensor does not fail: "
                "gap in P7 (dynamic): why",
            ),
        ),
    ],
)
def test_a_gap_of_torchs_compiler_needs_a_failure_of_torchs_own_subclass(
    gap: Gap | None, theirs: str | None, found: tuple[str, str]
) -> None:
    gaps = GapTracker([] if gap is None else [gap])
    assert gaps.judged("P7", "float32 dynamic", "broken", "it raises", lambda: theirs) == found
    assert gaps.judged("P7", "float32 dynamic", "pass", "", lambda: theirs) == ("pass", "")
    assert gaps.closed() == []  # it has failed once


def test_a_gap_that_no_longer_fails_is_reported() -> None:
    gaps = GapTracker([TORCHS])
    gaps.judged("P7", "float32 dynamic", "pass", "", lambda: pytest.fail("asked"))
    assert gaps.closed() == [TORCHS]


class InMode(Subject):
    """Calls plainly, and has one mode, which is told how to call."""

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        self._call = call

    def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs) if self._call is None else self._call(fn, *args)

    def modes(self) -> dict[str, Subject]:
        return {"aot_eager": _MODES[self.name]}


def _raise(*arguments: object) -> Tensor:
    raise TypeError("no wrapper is taken")


_MODES: dict[str, Subject] = {
    "same": InMode(lambda fn, x: fn(x)),
    "raises": InMode(_raise),
    "another value": InMode(lambda fn, x: fn(x) * 2),
    "another gradient": InMode(lambda fn, x: fn(x.detach() + 2 * (x - x.detach()))),
}


@pytest.mark.parametrize(
    ("mode", "function", "says"),
    [
        ("same", torch.exp, None),
        ("raises", torch.exp, "TypeError: no wrapper is taken"),
        ("raises", _raise, None),  # in eager too
        ("another value", torch.exp, "Broken: aot_eager: result 0: "),
        ("another gradient", torch.exp, "Broken: aot_eager: gradient 0: "),
    ],
)
def test_torchs_own_subclass_is_the_control(mode: str, function: Callable[..., Tensor], says: str | None) -> None:
    sample = Sample(function, (torch.rand(2, 3) + 1,), {}, 0, torch.float32)
    masks = masking("half", sample.tensors)
    assert masks is not None
    subject = InMode()
    subject.name = mode
    found = torch_fails_too(Trial(subject, sample, masks), "aot_eager")
    assert (found or "").startswith(says or "")
    assert (found is None) == (says is None)


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
    monkeypatch.setattr(command.runner, "run", lambda names, settings, **rest: asked.append(names) or [])
    for seed in ("0", "0", "1"):
        arguments = ["check", "--tier", "compiled", "--mode", "inductor_dynamic", "--draw", "5", "--seed", seed]
        assert command.main(arguments) == 0
    assert asked[0] == asked[1] != asked[2]
    assert [len(set(names)) for names in asked] == [5, 5, 5]
    assert set(asked[0]) <= set(database())
