"""README and docs as texts: their pages, the blocks of a page, and its examples, which are run."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import op_registry
from repository import ROOT

README = ROOT / "README.md"
PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "examples/third_party/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]

FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Its examples and commands need the extra `xla`: tests/thorough/torchax/test_torchax.py runs such where it is.
ON_XLA = ROOT / "docs/xla.md"


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def examples_of(page: Path) -> str:
    return "\n".join(text for language, text in FENCED.findall(text_of(page)) if language == "python")


PAGES_WITH_EXAMPLES = [page for page in PAGES if examples_of(page) and page != ON_XLA]
# Their examples compile, or export.
PAGES_THAT_COMPILE = [
    page for page in PAGES_WITH_EXAMPLES if re.search(r"torch\.compile|\bexport\(", examples_of(page))
]


def run_examples(page: Path) -> None:
    """Fails with what the examples print and the page does not say."""
    example = doctest.DocTestParser().get_doctest(examples_of(page), {}, page.name, str(page), 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    report: list[str] = []
    with op_registry.registry.overlay():
        runner.run(example, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)
