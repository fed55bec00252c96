"""The training of examples/distributed: all ranks together, and each rank alone."""

from __future__ import annotations

import tempfile

import torch
from torch import distributed

from examples.distributed.training import Training
from process_groups import Check


def pixels() -> torch.Tensor:
    """Correlated numbers in the form of the digits, which take seconds to import."""
    generator = torch.Generator().manual_seed(5)
    factors = torch.randn(300, 4, generator=generator).double(), torch.randn(4, 64, generator=generator).double()
    x = torch.sigmoid(factors[0] @ factors[1])
    return x.masked_fill(torch.rand(300, 64, generator=generator) < 0.4, torch.nan)


def curve(rank: int, ranks: int) -> None:
    groups = [distributed.new_group([r]) for r in range(ranks)]
    together, alone = Training(pixels()), Training(pixels(), groups[rank])
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        distributed.broadcast_object_list(folder)
        together.until(25)
        together.save(folder[0])
        together.until(50)
        if rank == 1:
            alone.load(folder[0])  # what all have saved; the other ranks begin at the beginning
        distributed.barrier()
    alone.until(50)
    every = [None] * ranks
    distributed.all_gather_object(every, together.valid)
    assert len(set(every)) == ranks, "every rank has another number of valid pixels"
    losses = [torch.tensor(training.losses, dtype=torch.float64) for training in (together, alone)]
    torch.testing.assert_close(*losses, rtol=1e-10, atol=0)
    for one, other in zip(together.weights(), alone.weights(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)
    assert together.losses[-1] < 0.9 * together.losses[0]


SLOW: dict[str, Check] = {"example: 50 steps, interrupted or not, on all ranks or one": curve}
