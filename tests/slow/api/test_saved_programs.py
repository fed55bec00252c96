"""A program that masked_dispatch.export made runs from its file where the library is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import masked_dispatch as md
from compiled_regions import masked
from fresh_processes import run_without_library
from pairs_for_masked_tensors import BATCH, expected, pair

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # torch's own LeafSpec, in export and its copies
]


def test_a_saved_program_runs_without_the_library(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Softmax(-1))
    net[0].weight = nn.Parameter(masked(6, 6))
    x = masked(5, 6)
    torch.export.save(md.export(net, (masked(4, 6),), dynamic_shapes=({0: BATCH},)), tmp_path / "net.pt2")
    torch.save((pair(x), expected(net(x))), tmp_path / "wanted.pt")
    code = """
import torch
arguments, wanted = torch.load("wanted.pt")
torch.testing.assert_close(torch.export.load("net.pt2").module()(arguments), wanted)
print("equal")
"""
    assert run_without_library(code, folder=tmp_path) == "equal\n"
