"""Every command of op_registry prints its results as one JSON document on request, and says how it ended."""

from __future__ import annotations

import io
import json
import shlex
import sys
from typing import Any

import pytest

from op_registry import progress as bars
from op_registry import registry
from op_registry.__main__ import EXAMPLES, main

SUBJECT = ["--subject", "masked_dispatch.conformance_subject:eager"]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, exit_code: int = 0) -> Any:
    assert main([*arguments, "--json"]) == exit_code
    out, err = capsys.readouterr()
    assert err == ""  # no bar: nobody looks at a terminal
    document = json.loads(out)
    assert document["torch"]
    assert document["command"].split()[0] == arguments[0]
    return document


def test_coverage(capsys: pytest.CaptureFixture[str]) -> None:
    document = printed(capsys, "coverage")
    (softmax,) = [entry for entry in document["database"] if entry["name"] == "softmax"]
    assert (softmax["state"], softmax["family"]) == ("rule", "normalization")
    assert "float32" in softmax["dtypes"]
    assert {entry["name"] for entry in document["core"]} >= {"aten.add.Tensor", "aten.mm.default"}
    assert document["rules"] == len(registry)


@pytest.mark.parametrize(
    ("name", "overload"),
    [
        ("torch.cumsum", "aten.cumsum.default"),
        ("F.relu", "aten.relu.default"),
    ],
)
def test_explain(name: str, overload: str, capsys: pytest.CaptureFixture[str]) -> None:
    document = printed(capsys, "explain", name, "--no-samples")
    (of_overload,) = [each for each in document["overloads"] if each["overload"] == overload]
    assert of_overload["state"] == "rule"
    assert of_overload["where"].startswith("op_registry/ops/")
    main(["explain", name, "--no-samples"])
    assert document["text"] == capsys.readouterr().out.rstrip("\n")


def test_check(capsys: pytest.CaptureFixture[str]) -> None:
    document = printed(capsys, "check", "--op", "cumsum", "--law", "P2", "--most", "1", *SUBJECT)
    (cumsum,) = document["operators"]
    assert document["holds"] is True
    assert cumsum["operator"] == "cumsum"
    assert cumsum["laws"]["P2"]["decision"] == "holds"
    assert cumsum["laws"]["P2"]["trials"]["pass"] > 0


def test_check_of_a_broken_subject(capsys: pytest.CaptureFixture[str]) -> None:
    document = printed(capsys, "check", "--op", "mean", "--law", "P2", "--subject", "zeros", exit_code=1)
    assert document["holds"] is False
    failures = document["operators"][0]["laws"]["P2"]["failures"]
    assert failures[0]["repeat"].startswith("python -m op_registry check --op mean --law P2 --sample ")


def test_mutants(capsys: pytest.CaptureFixture[str]) -> None:
    document = printed(capsys, "mutants", "--op", "flip", "--way", "mask lost", "--workers", "0")
    assert document["uncalled"] == document["not_accounted_for"] == []
    assert {(fate["way"], fate["state"]) for fate in document["fates"]} == {("mask lost", "killed")}
    assert {fate["sparse"] for fate in document["fates"]} == {False, True}


def test_fuzz(capsys: pytest.CaptureFixture[str]) -> None:
    document = printed(capsys, "fuzz", "--n", "2", "--seed", "3", *SUBJECT)
    assert (document["law"], document["first_seed"], document["programs"], document["broken"]) == ("P3", 3, 2, [])


def test_check_on_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    document = printed(capsys, "check", "--device", "xpu", "--op", "exp")
    assert document["skipped"].startswith("no device xpu on this machine")


def test_an_unknown_name_exits_with_2_and_prints_no_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "torch.cumsun", "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "cumsum" in err


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "run the laws on operators" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    ["fuzz --n 0", "fuzz --n -3", "check --draw 0", "check --op exp --sample 999", "mutants --way nothing",
     "check --op exp --op log --slice 5/6"],
)  # fmt: skip
def test_a_check_of_nothing_does_not_succeed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(command.split())
    except SystemExit as left:
        code = left.code  # type: ignore[assignment]
    assert code != 0, capsys.readouterr().out


@pytest.mark.parametrize("command", [[], *([name] for name in EXAMPLES)], ids=lambda command: " ".join(command))
def test_help_has_an_example_and_the_exit_codes(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([*command, "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert EXAMPLES[command[0] if command else "explain"] in text
    assert "exit codes: 0 nothing is wrong; 1 a law is broken" in text
    assert not command or "--json" in text


def test_there_is_an_example_for_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert {shlex.split(example)[3] for example in EXAMPLES.values()} == set(EXAMPLES)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "{coverage,explain,check,mutants,fuzz}" in capsys.readouterr().out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_drawn_on_a_terminal_after_two_seconds_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bars.DELAY == 2.0
    for stream, delay, drawn in ((Terminal(), 0.0, True), (Terminal(), 2.0, False), (io.StringIO(), 0.0, False)):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(bars, "DELAY", delay)
        assert list(bars.progress(range(3), 3, "step")) == [0, 1, 2]
        assert ("/3" in stream.getvalue()) is drawn


def test_without_tqdm_there_is_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    monkeypatch.setattr(bars, "DELAY", 0.0)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert list(bars.progress(range(3), 3, "step")) == [0, 1, 2]
    assert stream.getvalue() == ""
