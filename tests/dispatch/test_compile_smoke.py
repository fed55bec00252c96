"""Whether compiling works at all: these are all tests of the fast tier that compile, export, or start a process.

One training step, one masked mean without recompiles, one export, one write in a graph, one process. Everything else of
the kind is in tests/thorough and tests/slow.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

import masked_dispatch as md
from compiled_regions import compiled, data_and_mask, masked, same

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def loss(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight).square().mean().to_tensor(0.0)


def test_a_training_step_in_a_graph_is_the_eager_step() -> None:
    run, backend = compiled(loss)
    x, weight = masked(), nn.Parameter(torch.randn(6, 6))
    stepped = []
    for call in (run, loss):
        moved = nn.Parameter(weight.detach().clone())
        call(x, moved).backward()
        torch.optim.SGD([moved], lr=0.1).step()
        stepped.append(moved.detach())
    same(*stepped)
    assert not torch.equal(stepped[0], weight)
    assert backend.graphs == 1


def test_a_masked_mean_is_one_graph_for_every_mask() -> None:
    run, backend = compiled(lambda x: x.mean(-1))
    for share in (0.1, 0.5, 0.9):
        x = masked(mask=torch.rand(4, 6) < share)
        same(run(x), x.mean(-1))
        x[0] = masked(6)
        same(run(x), x.mean(-1))
    assert backend.graphs == 1


class Mean(nn.Module):
    def forward(self, data: Tensor, mask: Tensor) -> Tensor:
        return md.as_masked_tensor(data, mask).mean(0).to_tensor(0.0)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own LeafSpec, in export and its copies
def test_an_exported_module_gives_what_it_gives_itself() -> None:
    program = torch.export.export(Mean(), data_and_mask())
    arguments = data_and_mask()
    same(program.module()(*arguments), Mean()(*arguments))


def test_a_write_in_a_graph_reaches_the_argument() -> None:
    def write(x: Tensor) -> Tensor:
        x[0].fill_(1.0)
        return x.sum(-1)

    run, backend = compiled(write)
    x = masked()
    y = x.clone()
    same(run(x), write(y))
    same(x, y)
    assert x.get_mask()[0].all()
    assert backend.graphs == 1


def test_a_new_process_loads_the_library_and_no_compiler() -> None:
    program = (
        "import sys, torch, masked_dispatch as md\n"
        "x = md.masked_tensor(torch.tensor([1.0, 5.0]), torch.tensor([True, False]))\n"
        "md.from_lengths(x[None], torch.tensor([1])).sum(1)\n"
        "print(x.mean().item(), 'torch._dynamo' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("1.0 False\n", 0), done.stderr


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 traces backward() of its own tensors alone")
def test_a_step_with_its_backward_inside() -> None:
    """In one graph, as docs/tour.md has it: torch traces backward() if it is told to, and no result may need it."""
    x = md.masked_tensor(torch.arange(6.0).view(2, 3), torch.tensor([[True, False, True], [True, True, True]]))
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (x * weight).sum(1).square().mean()
        loss.backward()
        return loss.detach()

    loss, wanted = step(x), weight.grad
    weight.grad = None
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        compiled = torch.compile(step, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(compiled.to_tensor(0), loss.to_tensor(0))
    assert weight.grad is not None
    assert wanted is not None
    assert torch.equal(weight.grad, wanted)
