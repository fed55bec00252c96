"""What the README says runs: its examples print what it says they print, its commands are there."""

from __future__ import annotations

import doctest
import re
import shlex
from pathlib import Path

import pytest

import op_registry
from benchmarks.__main__ import NAMES as BENCHMARKS
from op_registry.__main__ import main
from op_registry.report import coverage

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
# Every fenced block: its language, "" where it has none, and its text.
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
COMMANDS = [
    line.partition("#")[0].strip()
    for language, text in BLOCKS
    if language == ""
    for line in text.splitlines()
    if line.strip()
]


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    assert {language for language, _ in BLOCKS} == {"python", ""}
    assert len(BLOCKS) >= 9
    for language, text in BLOCKS:
        if language == "python":
            assert text.startswith(">>> "), f"not an example that is run:\n{text}"
    assert COMMANDS
    for command in COMMANDS:
        assert command.startswith(("make ", "python -m op_registry ", "python -m benchmarks ")), command


def test_the_examples_print_what_the_readme_says() -> None:
    examples = "\n".join(text for language, text in BLOCKS if language == "python")
    example = doctest.DocTestParser().get_doctest(examples, {}, "README.md", str(README), 0)
    assert len(example.examples) > 40
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL)
    report: list[str] = []
    with op_registry.registry.overlay():
        runner.run(example, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("python -m op_registry ")])
def test_the_commands_of_op_registry_work(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = shlex.split(command)[3:]
    if arguments[0] == "check":
        arguments += ["--law", "P2", "--sample", "1", "--subject", "masked_dispatch.conformance_subject:eager"]
    if arguments[0] == "mutants":  # all of them take minutes
        arguments += ["--only", "strangers", "--way", "mask lost", "--workers", "0"]
    assert main(arguments) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 2


def test_there_is_a_command_of_each_kind() -> None:
    assert {c.split()[3] for c in COMMANDS if "op_registry" in c} >= {"explain", "coverage", "check", "mutants"}


def test_the_options_that_the_readme_names_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["coverage", "--help"])
    assert left.value.code == 0
    assert "--measure" in capsys.readouterr().out
    assert f"{len(list(coverage.entries()))} OpInfos" in README.read_text(encoding="utf-8")


def test_the_targets_of_make_are_there() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    named = {word for c in COMMANDS if c.startswith("make ") for word in c.split()[1:2]}
    assert named
    assert named <= set(targets)


def test_the_benchmarks_are_there() -> None:
    (line,) = [text for _, block in BLOCKS for text in block.splitlines() if text.startswith("python -m benchmarks ")]
    named = [shlex.split(line, comments=True)[3], *re.split(r",\s*", line.partition("also: ")[2])]
    assert sorted(named) == sorted(BENCHMARKS)
