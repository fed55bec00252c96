"""Masked tensors on XLA by torchax: tests that run in processes of their own, in an environment with the extra;
every operator compiled by XLA, in parts, and the benchmark of what is compiled and copied there.

The device is named once for a process; and the extra is large, and not among what `make test` installs.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import masked_dispatch as md
from benchmarks import xla
from benchmarks.harness import Unavailable
from masked_dispatch.torchax.internals import CHECKED
from repository import ROOT
from xla_environment import compared_with_the_cpu, requirements, run_with_torchax


@pytest.mark.parametrize("file", ["tests_on_torchax.py", "assumptions_about_torchax.py"])
def test_in_an_environment_with_torchax(file: str) -> None:
    done = run_with_torchax("-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", file)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"\n=+ (\d+) passed", done.stdout)
    assert passed is not None, done.stdout[-2000:]
    assert int(passed[1]) >= 6


def test_the_examples_of_the_page(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/xla.md").read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) >= 5
    (tmp_path / "examples.txt").write_text("\n".join(blocks), encoding="utf-8")
    done = run_with_torchax("-W", "ignore", "-m", "doctest", "-o", "ELLIPSIS", "examples.txt", where=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_transformer_is_trained_in_one_program_as_in_a_loop_on_the_cpu() -> None:
    done = run_with_torchax("-W", "ignore", "-m", "examples.xla", where=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = re.findall(r"^ *\d+ +\d+% +([\d.]+) +([\d.]+)$", done.stdout, re.MULTILINE)
    assert len(rows) == 20
    assert [float(there) for _, there in rows] == pytest.approx([float(here) for here, _ in rows], rel=1e-5)
    assert len({here for here, _ in rows}) == 20
    assert done.stdout.endswith("compilations of the step, over 20 masks: 1\n")


FAST = ("exp", "sum", "softmax", "cat", "topk", "masked_select", "linalg_ldl_factor")


def test_some_operators_compiled_by_xla_give_what_they_give_on_the_cpu() -> None:
    """For three masks, by one compilation; what plain torchax does not run either is not comparable."""
    results, gradients, said = compared_with_the_cpu(*(word for name in FAST for word in ("--op", name)))
    assert results >= 6
    assert gradients >= 5
    assert "device compared nothing of 1 (masked_select): plain torch on jax raises" in said


def test_the_benchmark_is_skipped_by_name_where_the_extra_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchax", None)
    with pytest.raises(Unavailable, match=r"pip install 'masked-dispatch\[xla\]'"):
        xla.run()


def test_the_extra_names_what_the_library_was_checked_with() -> None:
    assert f"torchax=={CHECKED}; python_version >= '3.11'" in requirements()


@pytest.mark.parametrize("missing", ["torchax", "jax"])
def test_without_torchax_the_extra_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "torchax.interop", raising=False)
    with pytest.raises(ImportError, match=r"need torchax and jax.*pip install 'masked-dispatch\[xla\]'"):
        md.torchax.enable()


SLICES = 96  # each in a process of its own: XLA's compiler has crashed in one that had compiled hundreds of programs


@pytest.mark.parametrize("part", range(SLICES))
def test_operators_compiled_by_xla_give_what_they_give_on_the_cpu(part: int) -> None:
    """For three masks, by one compilation; what plain torchax does not run either is not comparable."""
    compared_with_the_cpu("--slice", f"{part}/{SLICES}")


def test_the_benchmark_reaches_its_goals() -> None:
    done = run_with_torchax("-W", "ignore", "-m", "benchmarks", "xla", where=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = {line.split("│")[1].strip(): line.split("│")[2:-1] for line in done.stdout.splitlines() if "│" in line}
    table = {name: [cell.strip() for cell in cells] for name, cells in rows.items()}
    assert table["torch.where"] == ["1", "0", "64.00"]
    assert table["masked_dispatch"] == ["1", "0", "64.06"]
    assert int(table["masked_select, eager"][0]) >= 20
    assert "NO" not in done.stdout
