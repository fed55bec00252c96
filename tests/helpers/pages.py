"""README and docs as texts: their pages, the blocks of a page, and its examples, which are run."""

from __future__ import annotations

import doctest
import re
import shlex
from pathlib import Path

import op_registry
from op_registry.__main__ import main
from repository import ROOT

README = ROOT / "README.md"
PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "examples/third_party/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
ON_THE_SITE = [page for page in PAGES if page.is_relative_to(ROOT / "docs") and page.parent.name != "results"]

FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Its examples and commands need the extra `xla`: tests/slow/torchax/test_torchax.py runs such where it is.
ON_XLA = ROOT / "docs/xla.md"


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def examples_of(page: Path) -> str:
    return "\n".join(text for language, text in FENCED.findall(text_of(page)) if language == "python")


PAGES_WITH_EXAMPLES = [page for page in PAGES if examples_of(page) and page != ON_XLA]
# Pages whose examples compile, export, or ask the laws.
PAGES_THAT_TAKE_LONG = [
    page
    for page in PAGES_WITH_EXAMPLES
    if re.search(r"torch\.compile|\bexport\(", examples_of(page))
    or page.name in ("add-a-storage.md", "write-a-rule.md")
]


# What a box of code holds on the site at 1280 pixels (docs/stylesheets/pages.css).
LONGEST_LINE = 88


class WrappedOutput(doctest.OutputChecker):
    """An output with a line that no box holds may be wrapped at spaces on the page; others are compared as they are."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        if any(len(line) > LONGEST_LINE for line in got.splitlines()):
            optionflags |= doctest.NORMALIZE_WHITESPACE
        return super().check_output(want, got, optionflags)


def run_examples(page: Path) -> None:
    """Fails with what the examples print and the page does not say."""
    example = doctest.DocTestParser().get_doctest(examples_of(page), {"__name__": "__main__"}, page.name, str(page), 0)
    runner = doctest.DocTestRunner(WrappedOutput(), optionflags=doctest.ELLIPSIS)
    report: list[str] = []
    with op_registry.registry.overlay():
        runner.run(example, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


def commands_of(page: Path) -> list[str]:
    """The lines of blocks without a language, without their comments."""
    blocks = [text for language, text in FENCED.findall(text_of(page)) if language == ""]
    lines = [line.partition("#")[0].strip() for text in blocks for line in text.splitlines()]
    return [line for line in lines if line]


# Those of the third-party page need that package: `make third-party` installs it.
COMMANDS_OF_OP_REGISTRY = [
    command
    for page in PAGES
    if page.parent.name != "third_party" and page != ON_XLA
    for command in commands_of(page)
    if command.startswith("python -m op_registry ")
]


# They take seconds.
LONG_COMMANDS = [command for command in COMMANDS_OF_OP_REGISTRY if command.split()[3] in ("mutants", "fuzz")]


def run_command(command: str) -> int:
    """What a command of op_registry ends with; those that take minutes do a part of their work."""
    arguments = shlex.split(command)[3:]
    if arguments[0] == "check":
        arguments += ["--law", "P2", "--sample", "1", "--subject", "masked_dispatch.conformance_subject:eager"]
    if arguments[0] == "mutants":  # all of them take minutes
        arguments += ["--op", "flip", "--way", "mask lost", "--workers", "0"]
    return main(arguments)
