"""Every operator compiled by XLA, in parts, and the benchmark of what is compiled and copied there."""

from __future__ import annotations

import pytest

from operators_on_xla import compared_with_the_cpu
from repository import ROOT
from xla_environment import run_with_torchax

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
