"""The pytest plugin of op_registry, found by entry point: command-line options and a summary table of its tests.

It is a separate module, so that test sessions without such tests import neither torch nor the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

PROPERTY = "op_registry"


@dataclass
class Options:
    """The options on the command line; None for one that is not given, which each call of `instantiate` decides."""

    laws: tuple[str, ...] | None = None
    layouts: tuple[str, ...] | None = None
    devices: tuple[str, ...] | None = None


@dataclass
class Table:
    """The worst decision for each operator and law among the tests so far."""

    answers: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, operator: str, law: str, decision: str) -> None:
        worst = self.answers.get((operator, law))
        if worst is None or WORST_FIRST.index(decision) < WORST_FIRST.index(worst):
            self.answers[operator, law] = decision

    def lines(self) -> list[str]:
        """A row for each operator, a column for each law."""
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


def _split(values: Sequence[str] | None) -> tuple[str, ...] | None:
    return tuple(part for value in values for part in value.split(",") if part) if values else None


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("op_registry", "masked operators (op_registry.testing.instantiate)")
    for name, what in (
        ("laws", "only these laws: P1,P4"),
        ("layouts", "only these layouts: dense,csr,packed"),
        ("devices", "on these devices: cpu,cuda"),
    ):
        group.addoption(
            f"--op-registry-{name}", action="append", metavar=name.upper(), help=f"{what} (separated by commas)"
        )


def pytest_configure(config: pytest.Config) -> None:
    options.laws = _split(config.getoption("--op-registry-laws"))
    options.layouts = _split(config.getoption("--op-registry-layouts"))
    options.devices = _split(config.getoption("--op-registry-devices"))


def pytest_report_header() -> list[str]:
    selected = {name: values for name, values in vars(options).items() if values is not None}
    text = "; ".join(f"{name} {', '.join(values)}" for name, values in selected.items())
    return [f"op_registry: {text}"] if text else []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the decision for each operator and law."""
    table = Table()
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == PROPERTY and report.when == "call":
                    table.add(*value)
    if table.answers:
        terminalreporter.section("op_registry: results by operator and law")
        for line in table.lines():
            terminalreporter.write_line(line)
