"""The benchmarks' instruments that need a compiler or a process: kernels in C++, graphs that are counted, help."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from benchmarks import conversions, graphs, reductions
from benchmarks.kernels import ELEMENTWISE_RESULT, OnePass
from repository import ROOT


@pytest.mark.parametrize("name", reductions.BY_HAND)
def test_one_pass_kernels_compute_what_they_are_compared_with(name: str) -> None:
    torch.manual_seed(0)
    x, m = torch.randn(7, 67), torch.rand(7, 67) < 0.5
    reference = x.double().requires_grad_()
    expected = reductions.BY_HAND[name](reference, m)
    g = torch.randn(expected.shape)
    (gradient,) = torch.autograd.grad(expected, reference, g.double())

    kernel = OnePass(name, torch.where(m, x, torch.nan), m.to(torch.int8))

    def same(a: Tensor, b: Tensor) -> None:
        torch.testing.assert_close(a, b.detach().float(), rtol=1e-5, atol=1e-5)

    same(kernel.forward(), expected)
    same(kernel.forward_backward(g), gradient)
    assert kernel.out.shape == (x.shape if name in ELEMENTWISE_RESULT else x.shape[:1])


def test_help_has_an_example_and_the_exit_codes() -> None:
    help_text = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--help"], check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout
    assert "python -m benchmarks fill --rounds 5 --json fill.json" in help_text
    assert "exit codes: 0 measured" in help_text


def test_graphs_breaks_and_recompiles_are_counted() -> None:
    torch.compiler.reset()
    once = torch.compile(lambda x: x.sin() + 1, backend="eager")
    assert graphs.counted(once, [torch.ones(3)] * 3) == graphs.Graphs(graphs=1, breaks=0, recompiles=0, kernels=0)

    def breaking(x: Tensor) -> Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        return x + 1

    found = graphs.counted(torch.compile(breaking, backend="eager"), [torch.ones(3), torch.ones(4)])
    assert found == graphs.Graphs(graphs=2, breaks=1, recompiles=2, kernels=0)


def test_the_peak_of_a_conversion_is_measured_in_a_process_of_its_own() -> None:
    assert conversions.extra_memory("masked_dispatch", "csr", 64, 0.5) >= 0
