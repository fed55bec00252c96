"""The README's examples print what it says they print."""

from __future__ import annotations

import doctest
from pathlib import Path

import op_registry

README = Path(__file__).parent.parent / "README.md"


def test_the_examples_print_what_the_readme_says() -> None:
    parser = doctest.DocTestParser()
    # A fence ends an example, which doctest does not know.
    text = README.read_text(encoding="utf-8").replace("```", "")
    example = parser.get_doctest(text, {}, "README.md", str(README), 0)
    assert len(example.examples) > 15
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL)
    report: list[str] = []
    with op_registry.registry.overlay():
        runner.run(example, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)
