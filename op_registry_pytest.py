"""The pytest plugin of op_registry, found by entry point: for tests made by ``op_registry.testing.instantiate``.

A module by itself, so that a test session that has none of these tests imports neither torch nor the rule book.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

PROPERTY = "op_registry"


@dataclass
class Options:
    """What the command line says; None where it says nothing, and each call of `instantiate` decides."""

    laws: tuple[str, ...] | None = None
    layouts: tuple[str, ...] | None = None
    devices: tuple[str, ...] | None = None


@dataclass
class Table:
    """What came of the tests so far: the answer for each operator and law, the worst one of several."""

    answers: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, operator: str, law: str, decision: str) -> None:
        before = self.answers.get((operator, law))
        if before is None or WORST_FIRST.index(decision) < WORST_FIRST.index(before):
            self.answers[operator, law] = decision

    def lines(self) -> list[str]:
        """A line for each operator, a column for each law."""
        operators = sorted({operator for operator, _ in self.answers})
        laws = sorted({law for _, law in self.answers})
        width = max(map(len, operators), default=0)
        head = f"{'':{width}s}" + "".join(f"  {law:>9s}" for law in laws)
        rows = [
            f"{o:{width}s}" + "".join(f"  {SHORT.get(self.answers.get((o, law), ''), ''):>9s}" for law in laws)
            for o in operators
        ]
        return [head, *rows]


WORST_FIRST = ("broken", "undecided", "gap", "holds", "does not apply")
SHORT = {d: d for d in WORST_FIRST} | {"does not apply": "-"}

options = Options()


def _by_comma(values: Sequence[str] | None) -> tuple[str, ...] | None:
    return tuple(part for value in values for part in value.split(",") if part) if values else None


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("op_registry", "masked operators (op_registry.testing.instantiate)")
    for name, what in (
        ("laws", "only these laws: P1,P4"),
        ("layouts", "only these layouts: dense,csr,packed"),
        ("devices", "on these devices: cpu,cuda"),
    ):
        group.addoption(f"--op-registry-{name}", action="append", metavar=name.upper(), help=f"{what} (by comma)")


def pytest_configure(config: pytest.Config) -> None:
    options.laws = _by_comma(config.getoption("--op-registry-laws"))
    options.layouts = _by_comma(config.getoption("--op-registry-layouts"))
    options.devices = _by_comma(config.getoption("--op-registry-devices"))


def pytest_report_header() -> list[str]:
    given = {name: value for name, value in vars(options).items() if value is not None}
    said = "; ".join(f"{name} {', '.join(value)}" for name, value in given.items())
    return [f"op_registry: {said}"] if said else []


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The table of verdicts: what each law came to for each operator."""
    table = Table()
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == PROPERTY and report.when == "call":
                    table.add(*value)
    if table.answers:
        terminalreporter.section("op_registry: what each law came to")
        for line in table.lines():
            terminalreporter.write_line(line)
