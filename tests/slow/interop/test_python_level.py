"""Everything that torch writes in Python around its operators, put to the laws and held to a file.

Where the table has changed for good::

    python -m op_registry coverage --python-level --write tests/report/python_level.expect
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from op_registry.__main__ import main
from op_registry.conformance import python_calls as calls
from op_registry.conformance import python_distributions as distributions
from op_registry.conformance import python_level as names
from op_registry.conformance.python_level import Outcome, put_to_the_laws
from op_registry.conformance.sample import Sample
from op_registry.conformance.subject import Subject, find_subject
from op_registry.report import python_level
from op_registry.report.coverage import Entry
from repository import ROOT

EXPECTED = ROOT / "tests/report/python_level.expect"
AGAIN = "python -m op_registry coverage --python-level --write tests/report/python_level.expect"

# What is known to be wrong, and why. An entry that is mended fails the test, and is taken off the list.
KNOWN_WRONG: dict[str, str] = {}


@pytest.fixture(scope="module")
def found() -> list[Entry]:
    return python_level.entries()


def test_the_table_is_as_it_was_accepted(found: list[Entry]) -> None:
    accepted, now = EXPECTED.read_text().splitlines(), python_level.expectation(found).splitlines()
    changes = list(difflib.unified_diff(accepted, now, "accepted", "found", lineterm="", n=0))
    assert not changes, "\n".join([*changes, "", f"If that is as it should be: {AGAIN}"])


def test_nothing_is_wrong_that_is_not_known_to_be(found: list[Entry]) -> None:
    assert {entry.name for entry in found if entry.state == "wrong"} == set(KNOWN_WRONG)


def test_nearly_everything_that_is_not_refused_is_right(found: list[Entry]) -> None:
    right = sum(entry.state == "right" for entry in found)
    wrong = sum(entry.state == "wrong" for entry in found)
    assert right / (right + wrong) >= 0.95


def test_everything_has_a_sample_or_a_reason(found: list[Entry]) -> None:
    assert [entry.name for entry in found if entry.note == "no sample"] == []


def test_the_tables_by_hand_name_nothing_that_torch_lacks() -> None:
    known, lasts = set(names.all_names()), {name.rpartition(".")[2] for name in names.all_names()}
    by_name = {*calls.NUMBERED, *calls.OWN_VALUES, *calls.MUST_REFUSE, *KNOWN_WRONG}
    assert by_name - known == set()
    assert {*names.NO_FUNCTIONS, *calls.MODULES_NOT_CALLED} - lasts == set()
    kinds = {".".join(name.split(".")[:2]) for name in known}
    assert set(distributions.NOT_CALLED) - kinds == set()
    assert set(distributions.parameters()) - {kind.partition(".")[2] for kind in kinds} == set()


# ----------------------------------------------------------------------------------- the trial itself, on what is wrong


def divided_by_size(x: Tensor) -> Tensor:
    return x.sum(0) / x.size(0)


def zeros_for_holes(x: Tensor) -> Tensor:
    return torch.as_tensor(x.to_tensor(0) if hasattr(x, "to_tensor") else x)


def garbage(x: Tensor) -> Tensor:
    return x.get_data().abs().nan_to_num(0.0) if hasattr(x, "get_data") else x.abs()


def branching(x: Tensor) -> Tensor:
    if hasattr(x, "get_data") and not x.get_mask().all() and x.get_data().isnan().any():
        raise RuntimeError("a NaN")
    return x * 2


def random_and_revived(x: Tensor) -> Tensor:
    return torch.randn(x.shape) + (x.to_tensor(0) if hasattr(x, "to_tensor") else x)


@pytest.mark.parametrize(
    ("wrong", "law"),
    [
        (divided_by_size, "P2: result 0: 3 of 3 values differ"),
        (zeros_for_holes, "P8: a plain result"),
        (garbage, "P3: "),
        (branching, "P3: RuntimeError: a NaN and, with other garbage, 1 results"),
        (random_and_revived, "P8: a plain result"),
    ],
)
def test_the_trial_sees_what_is_wrong(wrong: object, law: str) -> None:
    outcome = Outcome()
    put_to_the_laws(find_subject(), Sample(wrong, (torch.randn(4, 3),), {}, 0, torch.float32), outcome)  # type: ignore[arg-type]
    assert outcome.state == "wrong"
    assert any(failure.startswith(law) for failure in outcome.failures), outcome.failures


def test_zeros_for_what_is_missing_are_not_right() -> None:
    zeros: Subject = find_subject("zeros")
    assert python_level.entry_of("nn.functional.normalize", zeros).state == "wrong"


def test_the_command_prints_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(names, "all_names", lambda: ["nn.functional.lp_pool1d", "nn.Module", "functional.lu"])
    assert main(["coverage", "--python-level"]) == 0
    printed = capsys.readouterr().out
    assert "total 3" in printed
    assert "torch.nn.functional.kl_div: kl_div" in printed
    assert "nn.functional.lp_pool1d: right" not in printed


def test_the_command_writes_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(names, "all_names", lambda: ["nn.functional.lp_pool1d"])
    assert main(["coverage", "--python-level", "--write", str(tmp_path / "table")]) == 0
    assert (tmp_path / "table").read_text().startswith("nn.functional.lp_pool1d: right (P1 P2 P3)\n\nrules inside")


@pytest.mark.parametrize("name", ["Normal.log_prob", "Normal.mean", "kl_divergence"])
def test_distributions_validate_arguments_also_after_a_compilation(name: str, default_validation: None) -> None:
    """torch.compile turns validation off for the process, and the table must not depend on what ran before."""
    torch.distributions.Distribution.set_default_validate_args(False)
    sample = distributions.samples_of_distribution(f"distributions.{name}")[0]
    with pytest.raises(ValueError, match="to satisfy the constraint"):
        sample.fn(*(torch.full_like(t, torch.nan) for t in sample.args))
    assert not torch.distributions.Distribution._validate_args


@pytest.fixture
def default_validation() -> Iterator[None]:
    before = torch.distributions.Distribution._validate_args
    yield
    torch.distributions.Distribution.set_default_validate_args(before)
