"""The law "later": it notices what comes back through results that are left out, and says where it does not apply."""

from __future__ import annotations

from typing import Any

import pytest

from masked_dispatch.autograd.reached import Call
from op_registry.conformance import gaps
from op_registry.conformance.trials import Settings, run_operator
from op_registry.conformance.verdict import Report, answer_of
from op_registry.rule import Gap


def report_of(entry: str, **settings: Any) -> Report:
    return run_operator(entry, Settings(laws=("later",), most=2, **settings))


@pytest.fixture
def _forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Call, "needs", lambda *_: False)


STORED = {"dense": {}, "csr": {"also_stored": ("csr",), "dense": False}}


@pytest.mark.parametrize("stored", STORED.values(), ids=STORED)
@pytest.mark.parametrize("entry", ["exp", "mul", "softmax", "nn_functional_linear", "nn_functional_mse_loss"])
def test_it_holds(entry: str, stored: dict[str, Any]) -> None:
    answer = answer_of(report_of(entry, **stored), "later")
    assert answer.decision == "holds", answer
    assert answer.trials >= 2


@pytest.mark.usefixtures("_forgetful")
@pytest.mark.parametrize("stored", STORED.values(), ids=STORED)
@pytest.mark.parametrize("entry", ["exp", "mul", "softmax", "nn_functional_linear"])
def test_it_notices(entry: str, stored: dict[str, Any]) -> None:
    answer = answer_of(report_of(entry, **stored), "later")
    assert answer.decision == "broken"
    failure = answer.failures[0]
    assert "gradient 0: " in failure.message
    assert failure.message.endswith("comes back through results that are all invalid")
    assert f"check --op {entry} --law later --sample" in failure.repro
    assert failure.repro.endswith("--storage csr") == bool(stored)


@pytest.mark.usefixtures("_forgetful")
def test_an_exception_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gaps.TABLE, "exp", (Gap("later", "it forgets", "half"),))
    report = report_of("exp", masks=("half",))
    assert report.failures == []
    assert report.counts["later"]["gap"] == 1


@pytest.mark.parametrize(
    ("entry", "why"),
    [("argmax", "it has no derivative"), ("nn_functional_one_hot", "it has no derivative")],
)
def test_it_does_not_apply(entry: str, why: str) -> None:
    answer = answer_of(report_of(entry), "later")
    assert answer.decision == "does not apply", answer
    assert answer.reason.startswith(why)


def test_a_subject_that_does_not_speak_of_it_leaves_it_undecided() -> None:
    answer = answer_of(report_of("exp", subject="records"), "later")
    assert (answer.decision, answer.trials) == ("undecided", 0)
    assert "does not support it" in answer.reason
