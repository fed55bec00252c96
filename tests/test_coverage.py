"""The table of how operators are served, held to a file: a change in either has to be looked at.

When the table has changed for good, write the file again::

    python -m op_registry coverage --write tests/coverage.expect
"""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest
import torch

from op_registry import coverage, opaque, registry
from op_registry.__main__ import main
from op_registry.conformance.samples import database

aten = torch.ops.aten
EXPECTED = Path(__file__).with_name("coverage.expect")
AGAIN = "python -m op_registry coverage --write tests/coverage.expect"


def test_the_table_is_as_it_was_accepted() -> None:
    found, accepted = coverage.expectation().splitlines(), EXPECTED.read_text().splitlines()
    changes = list(difflib.unified_diff(accepted, found, "accepted", "found", lineterm="", n=0))
    assert not changes, "\n".join([*changes, "", f"If that is as it should be: {AGAIN}"])


def entry(name: str) -> coverage.Entry:
    return coverage.entry_of(database()[name])


def test_what_decomposes_is_taken_apart() -> None:
    assert entry("nn_functional_softsign").state == "decomposes"
    with registry.overlay() as mine:
        del mine._rules[aten.abs.default]
        assert str(entry("nn_functional_softsign")) == "nn_functional_softsign: missing (aten.abs.default)"


def test_a_rule_a_derived_form_and_an_opaque_operator() -> None:
    assert entry("exp").state == "rule"
    assert coverage.state_of(aten.exp_.default) == "derived"
    assert coverage.state_of(aten._foreach_exp.default) == "derived"
    with registry.overlay() as mine:
        del mine._rules[aten.exp.default]
        opaque(aten.exp.default)
        assert str(entry("exp")) == "exp: opaque (aten.exp.default)"


def test_what_takes_no_tensor_is_named() -> None:
    assert str(entry("tril_indices")) == "tril_indices: not applicable (takes no strided tensor)"


def test_every_entry_is_counted_once() -> None:
    entries = [coverage.Entry("a", "rule", "", "pointwise"), coverage.Entry("b", "missing", "aten.b", "")]
    head, *families, total = coverage.table(entries, "family").splitlines()
    assert head.split()[:3] == ["family", "rule", "derived"]
    assert [line.split()[0] for line in families] == ["-", "pointwise"]
    assert total.split() == ["total", "2", "1", "0", "0", "0", "0", "0", "1"]


def test_the_command_writes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "expectation", lambda: "exp: rule")
    assert main(["coverage", "--write", str(tmp_path / "table")]) == 0
    assert (tmp_path / "table").read_text() == "exp: rule\n"
