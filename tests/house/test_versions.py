"""Which releases of torch were tested stands in masked_dispatch/versions.py, and what another one meets at import."""

from __future__ import annotations

import re
import sys
import warnings

import pytest
import torch

import masked_dispatch
from masked_dispatch.assumptions import at_import
from masked_dispatch.assumptions.at_import import UntestedTorchWarning, check_untested
from masked_dispatch.assumptions.checks import ASSUMPTIONS, Assumption
from masked_dispatch.versions import TESTED, is_untested
from repository import ROOT

OLDEST, NEWEST = TESTED[0], TESTED[-1]
SHORT = OLDEST.rpartition(".")[0]


@pytest.mark.parametrize("file", ["README.md", "docs/index.md"])
def test_pages_name_these_versions(file: str) -> None:
    text = " ".join((ROOT / file).read_text(encoding="utf-8").split())
    assert f"torch ≥ {SHORT}" in text
    assert ", ".join(TESTED[:-1]) + f" and {NEWEST}" in text


def test_the_distribution_admits_these_versions() -> None:
    assert f'dependencies = ["torch>={SHORT}"]' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pinned = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(pinned) <= set(TESTED)


def test_untested_is_what_is_newer_than_the_newest_or_older_than_the_oldest() -> None:
    assert [v for v in (*TESTED, f"{NEWEST}+cu132", "2.12.0", "2.15.0a0+git12") if is_untested(v)] == []
    assert [v for v in ("2.15.1", "2.16.0a0+git12", "3.0.0", "2.10.0+cpu", "1.13.1") if not is_untested(v)] == []


def test_what_older_releases_lack_goes_with_them() -> None:
    """Each function of older_torch.py says which release makes it unnecessary, and no other file names one."""
    files = {
        path: path.read_text(encoding="utf-8")
        for p in ("op_registry", "masked_dispatch")
        for path in (ROOT / p).rglob("*.py")
    }
    named = {path.name: re.findall(r"# torch (\d+\.\d+): unnecessary", text) for path, text in files.items()}
    releases = named.pop("older_torch.py")
    assert not any(named.values())
    assert {*releases} <= {tested.rpartition(".")[0] for tested in TESTED[1:]}, "remove what the oldest torch has"
    public = re.findall(
        r"^(?:def )?([A-Za-z]\w*)(?:\(| = |: bool = )", files[ROOT / "op_registry/older_torch.py"], re.MULTILINE
    )
    assert len(releases) == len(public), public


@pytest.mark.parametrize("version", ["99.1.0", "2.10.0"])
def test_an_untested_torch_warns_once_and_names_the_command(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.warns(UntestedTorchWarning) as warned:
        check_untested()
    assert [str(w.message) for w in warned] == [
        f"masked_dispatch was tested with torch {OLDEST} to {NEWEST}, and this is {version}. `python -m "
        "masked_dispatch doctor` tells within a minute whether they work together."
    ]


def test_a_torch_that_would_give_wrong_results_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise AssertionError("torch 99.1.0 no longer holds that x")

    check = Assumption(7, "x is so", fails, silent=True)
    fails.__module__ = "masked_dispatch.assumptions.dispatch"
    monkeypatch.setattr(torch, "__version__", "99.1.0")
    monkeypatch.setattr(at_import, "ASSUMPTIONS", [*ASSUMPTIONS, check])
    with pytest.raises(ImportError) as refused:
        check_untested()
    assert str(refused.value) == (
        "masked_dispatch does not work with torch 99.1.0: masks and gradients would be wrong without an error. It was "
        f"tested with torch {OLDEST} to {NEWEST}. It relies on the following, which no longer holds:\n"
        "  7. x is so: torch 99.1.0 no longer holds that x\n"
        "Install one of these releases of torch, or a newer masked_dispatch. `python -m masked_dispatch doctor` "
        "examines the rest."
    )


def test_the_command_that_examines_torch_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_import, "broken", lambda: ["everything"])
    monkeypatch.setattr(sys, "argv", ["-m", "doctor", "--json"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "masked_dispatch", "doctor", "--json"])
    with warnings.catch_warnings(record=True) as caught:
        check_untested()
    assert caught == []
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "another", "doctor"])
    with pytest.raises(ImportError, match="everything"):
        check_untested()


def test_the_version_is_that_of_the_distribution() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nversion = "{masked_dispatch.__version__}"\n' in project
    assert f"\nversion: {masked_dispatch.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
