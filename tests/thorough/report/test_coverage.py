"""The table of how operators are served, held to a file: a change in either has to be looked at.

When a table has changed for good, write its file again::

    python -m op_registry coverage --write tests/report/coverage.expect
    python -m op_registry check --law P4 --table-of-storages op_registry/report/sparse_coverage.tsv
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from pathlib import Path

import pytest
import torch

from op_registry import registry
from op_registry.__main__ import TIERS, main
from op_registry.authoring import opaque
from op_registry.conformance.samples import database
from op_registry.conformance.trials import run_operator
from op_registry.report import conformance, coverage
from op_registry.sparse.record import Sparse
from repository import ROOT

aten = torch.ops.aten
EXPECTED = ROOT / "tests/report/coverage.expect"
AGAIN = "python -m op_registry coverage --write tests/report/coverage.expect"


def unlike(accepted: str, now: str) -> list[str]:
    return list(difflib.unified_diff(accepted.splitlines(), now.splitlines(), "accepted", "found", lineterm="", n=0))


def test_the_table_is_as_it_was_accepted() -> None:
    calls = coverage.measure()
    changes = unlike(EXPECTED.read_text(), coverage.expectation(calls))
    # Not the first line, which says when it was measured.
    kept, now = (
        coverage.KNOWN.read_text().partition("\n")[2],
        coverage.table_of_calls(calls, "").partition("\n")[2],
    )
    changes += unlike(kept, now)
    assert not changes, "\n".join([*changes, "", f"If that is as it should be: {AGAIN}"])


def test_what_is_known_gives_the_accepted_table_without_running_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> None:
        raise AssertionError("torch's operator database was asked")

    monkeypatch.setattr(coverage, "database", asked)
    assert not unlike(EXPECTED.read_text(), coverage.expectation())
    assert coverage.report().count("measured on 20") == 2


def test_what_is_known_follows_the_registry() -> None:
    def softsign() -> str:
        return next(str(e) for e in coverage.entries() if e.name == "nn_functional_softsign")

    assert softsign() == "nn_functional_softsign: decomposes"
    with registry.overlay() as mine:
        mine.withdraw(aten.abs.default)
        assert softsign() == "nn_functional_softsign: missing (aten.abs.default)"


def test_a_measured_table_names_its_date_torch_and_command() -> None:
    for path, command in (
        (coverage.KNOWN, AGAIN),
        (coverage.SHARES, coverage.COMMAND_OF_SHARES),
    ):
        how = coverage.measured_how(path)
        assert re.fullmatch(rf"measured on \d{{4}}-\d\d-\d\d with torch [\d.]+: {re.escape(command)}", how), how


def test_an_overload_that_this_torch_lacks_is_left_out(tmp_path: Path) -> None:
    line = "add\tfloat32\tno\taten.add.Tensor,aten.add.Never,aten.never_was.default\t"
    (tmp_path / "table").write_text(f"# head\n{chr(9).join(coverage.COLUMNS)}\n{line}\n")
    calls = coverage.known_calls(tmp_path / "table")["add"]
    assert calls == coverage.Calls("add", frozenset({torch.float32}), False, (aten.add.Tensor,))


def entry(name: str) -> coverage.Entry:
    return coverage.entry_from(coverage.calls_of(database()[name]))


def test_what_decomposes_is_taken_apart() -> None:
    assert entry("nn_functional_softsign").state == "decomposes"
    with registry.overlay() as mine:
        mine.withdraw(aten.abs.default)
        assert str(entry("nn_functional_softsign")) == "nn_functional_softsign: missing (aten.abs.default)"


def test_a_rule_a_derived_form_and_an_opaque_operator() -> None:
    assert entry("exp").state == "rule"
    assert coverage.state_of(aten.exp_.default) == "derived"
    assert coverage.state_of(aten._foreach_exp.default) == "derived"
    with registry.overlay() as mine:
        mine.withdraw(aten.exp.default)
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


def test_the_command_measures_and_writes_both_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exp = coverage.Calls("exp", frozenset({torch.float32}), False, (aten.exp.default,))
    monkeypatch.setattr(coverage, "measure", lambda: [exp])
    monkeypatch.setattr(coverage, "KNOWN", tmp_path / "known")
    assert main(["coverage", "--write", str(tmp_path / "table")]) == 0
    assert (tmp_path / "table").read_text().startswith("exp: rule\n\naten.")
    assert coverage.known_calls(tmp_path / "known") == {"exp": exp}


@pytest.mark.parametrize("option", ["--measure", "--verbose"])
def test_samples_are_run_when_asked_to_alone(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(coverage, "measure", lambda: asked.append("measured") or [])
    assert main(["coverage", option]) == 0
    assert asked == (["measured"] if option == "--measure" else [])
    assert ("measured just now" in capsys.readouterr().out) == (option == "--measure")


# ------------------------------------------------------------------------------------------------------- storages


def test_every_entry_is_in_the_table_of_storages() -> None:
    assert sorted(coverage.measured_shares()) == sorted(database())


@pytest.mark.parametrize("name", ["exp", "add", "clamp", "sum", "amax", "softmax", "transpose", "sort", "inner", "mm"])
def test_the_table_of_storages_is_as_it_was_measured(name: str) -> None:
    subject = "masked_dispatch.conformance_subject:eager"
    report = run_operator(name, dataclasses.replace(TIERS["quick"], subject=subject, laws=("P4",)))
    shares = conformance.storage_shares([report])[name]
    accepted = coverage.measured_shares()[name]
    now = {layout: shares.get(layout, (0, 0, 0)) for layout in coverage.LAYOUTS}
    assert now == accepted, (
        "python -m op_registry check --law P4 --table-of-storages op_registry/report/sparse_coverage.tsv"
    )


def test_where_a_sparse_form_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    assert coverage.form(aten.exp.default) == "generic"
    assert coverage.form(aten.mm.default) == "generic"
    assert coverage.form(aten.gather.default) == "own kernel"
    assert coverage.form(aten.linalg_inv_ex.default) in ("refused", "densifies")
    assert coverage.form_of_all([aten.gather.default, aten.exp.default]) == "own kernel"
    rule = registry.get(aten.gather.default)
    assert rule is not None
    monkeypatch.delitem(rule.lowerings, Sparse)
    assert coverage.form(aten.gather.default) == "densifies"
    assert coverage.form_of_all([aten.gather.default, aten.exp.default]) == "densifies"


def test_what_was_measured_has_the_last_word() -> None:
    assert coverage.state_of_storage("own kernel", (12, 12, 0)) == "own kernel"
    assert coverage.state_of_storage("densifies", (12, 12, 0)) == "generic"
    assert coverage.state_of_storage("own kernel", (3, 12, 0)) == "in part"
    assert coverage.state_of_storage("generic", (0, 12, 0)) == "densifies"
    assert coverage.state_of_storage("generic", (0, 0, 3)) == "refused"
    assert coverage.state_of_storage("generic", (0, 0, 0)) == "not tried"


def test_the_table_counts_entries_by_layout(tmp_path: Path) -> None:
    shares = {"a": {"coo": (2, 2, 0), "csr": (1, 2, 0)}, "b": {"coo": (0, 2, 0)}}
    (tmp_path / "table").write_text(coverage.table_of_shares(shares))
    again = coverage.measured_shares(tmp_path / "table")
    assert again["a"]["csr"] == (1, 2, 0)
    head, *rows = coverage.table_of_storages({"a": "own kernel", "b": "generic"}, again).splitlines()
    assert head.split()[:4] == ["stored", "as", "coo", "csr"]
    assert [row.rsplit(maxsplit=7)[1:3] for row in rows] == [
        ["1", "0"], ["0", "0"], ["0", "1"], ["1", "0"], ["0", "0"], ["0", "1"]
    ]  # fmt: skip
    assert "a: coo own kernel, csr in part (1 of 2), csc not tried" in coverage.listing_of_storages(
        {"a": "own kernel"}, again
    )
