"""``python -m masked_dispatch``: info and demo, as text and as JSON, their help and their exit codes."""

from __future__ import annotations

import dataclasses
import json
import platform
import re
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import pytest
import torch

from masked_dispatch.__main__ import EXAMPLES, EXIT_CODES, main
from masked_dispatch.assumptions.checks import Assumption
from masked_dispatch.command_line import demonstration, doctor
from op_registry import registry


def document(capsys: pytest.CaptureFixture[str], command: str, exit_code: int = 0) -> Any:
    assert main([command, "--json"]) == exit_code
    out, err = capsys.readouterr()
    assert err == ""
    values = json.loads(out)
    assert values["command"] == command
    return values


def test_info_says_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    facts = document(capsys, "info")
    assert facts["torch"] == torch.__version__
    assert facts["rules"] == len(registry)
    assert facts["devices"][0].startswith(f"cpu ({torch.backends.cpu.get_cpu_capability()}, ")
    assert facts["extras"]["test"]["pytest"] == pytest.__version__
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert f"torch             {torch.__version__}\n" in text
    assert re.search(rf"^\[test\] .*\bpytest {re.escape(pytest.__version__)}", text, re.MULTILINE)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    requires = ["torch>=2.13", "torch; extra == 'one'", 'no-such-library>=1; python_version >= "3" and extra == "one"']
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: requires)
    assert doctor.extras() == {"one": {"torch": metadata.version("torch"), "no-such-library": None}}
    main(["info"])
    assert f"[one]             torch {metadata.version('torch')}; missing: no-such-library\n" in capsys.readouterr().out


def test_sources_that_are_not_installed_are_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "DISTRIBUTION", "no-such-distribution")
    facts = doctor.info()
    assert facts["masked_dispatch"] == "not installed (imported from its sources)"
    assert facts["extras"] == {}


@pytest.fixture(scope="module")
def parts() -> list[demonstration.Part]:
    return list(demonstration.parts())


def test_every_part_of_the_demonstration_holds(parts: list[demonstration.Part]) -> None:
    assert [part.title for part in parts if not part.holds] == []
    assert len(parts) == 4


def test_the_demonstration_prints_each_part(
    parts: list[demonstration.Part], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demonstration, "parts", lambda: iter(parts))
    assert main(["demo"]) == 0
    out = capsys.readouterr().out
    for part in parts:
        assert f". {part.title}\n{part.text}\n" in out
    assert out.endswith("all 4 parts came out as claimed\n")
    assert "NOT AS CLAIMED" not in out
    values = document(capsys, "demo")
    assert values["holds"] is True
    assert [part["figures"] for part in values["parts"]] == [part.figures for part in parts]


def test_what_does_not_come_out_as_claimed_is_exit_code_1(
    parts: list[demonstration.Part], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def one_wrong() -> Iterator[demonstration.Part]:
        yield parts[0]
        yield dataclasses.replace(parts[1], holds=False)

    monkeypatch.setattr(demonstration, "parts", one_wrong)
    assert main(["demo"]) == 1
    assert capsys.readouterr().out.endswith(f"NOT AS CLAIMED\nnot as claimed: {parts[1].title}\n")
    assert document(capsys, "demo", exit_code=1)["holds"] is False


@pytest.mark.parametrize("broken", ["losses that differ", "no padding"])
def test_the_checks_can_fail(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken == "no padding":
        monkeypatch.setattr(
            demonstration, "from_lengths", lambda data, lengths: demonstration.from_nan(data.nan_to_num(9))
        )
        assert not demonstration.padding().holds
    else:
        monkeypatch.setattr(demonstration, "losses", lambda hidden, advance: [4.0, hidden])
        assert not demonstration.trained(lambda: None).holds


@pytest.mark.parametrize("command", [[], ["info"], ["demo"]], ids=lambda command: " ".join(command))
def test_help_has_an_example_and_the_exit_codes(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([*command, "--help"])
    assert left.value.code == 0
    out = capsys.readouterr().out
    assert EXAMPLES[command[0] if command else "demo"] in out
    assert EXIT_CODES in out


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out = capsys.readouterr().out
    assert EXIT_CODES in out
    assert "versions, devices, the number of rules" in out


def test_an_unknown_command_is_exit_code_2() -> None:
    with pytest.raises(SystemExit) as left:
        main(["information"])
    assert left.value.code == 2


# ------------------------------------------------------------------------------------------------------------- doctor


def test_doctor_says_that_all_holds_or_what_to_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [
        doctor.Part("assumptions about torch", 49, "checks", (), 5.25),
        doctor.Part("x[i] = v", 9, "assignments", (), 1.0),
    ]
    monkeypatch.setattr(doctor, "parts", lambda: iter(parts))
    assert main(["doctor"]) == 0
    version = doctor.version_of("masked-dispatch")
    assert capsys.readouterr().out == (
        "assumptions about torch      49 checks      all hold       5.2 s\n"
        "x[i] = v                      9 assignments all hold       1.0 s\n"
        f"verdict: masked_dispatch {version} works with torch {torch.__version__}\n"
    )
    parts[1] = doctor.Part("x[i] = v", 9, "assignments", ("strided, eager: x[list] = a float: found 1\nmore",), 1.0)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "x[i] = v                      9 assignments 1 BROKEN       1.0 s\n  strided, eager: x[list] = a" in out
    report = out.partition(f"verdict: masked_dispatch {version} does not work with torch {torch.__version__}; it ")[2]
    assert report.startswith("was tested with 2.1")
    assert report.endswith("\n  x[i] = v: strided, eager: x[list] = a float: found 1\n")
    assert f"  python {platform.python_version()}, " in report
    values = document(capsys, "doctor", exit_code=1)
    assert (values["holds"], values["torch"]) == (False, torch.__version__)
    assert [part["broken"] for part in values["parts"]] == [[], list(parts[1].broken)]


def test_doctor_names_an_assumption_that_is_broken_on_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise AssertionError("found 2, expected 1")

    fails.__module__ = "masked_dispatch.assumptions.engine"
    monkeypatch.setattr(doctor, "ASSUMPTIONS", [Assumption(16, "the engine adds", fails, silent=True)])
    part = next(doctor.parts())
    assert (part.asked, part.broken) == (1, ("16. the engine adds: found 2, expected 1",))
