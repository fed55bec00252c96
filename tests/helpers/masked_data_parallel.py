"""DistributedDataParallel with masked parameters, buffers, inputs and indices, against one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import masked_dispatch as md
from op_registry import MaskedSemanticsError
from process_groups import Checks
from refused_collectives import raises

CHECKS = Checks("DDP: ")
MASK = torch.tensor([[True, False, True], [True, True, False]])


class Holes(nn.Module):
    """A linear layer with holes in its weight, and a masked buffer."""

    def __init__(self) -> None:
        super().__init__()
        data = torch.arange(6.0, dtype=torch.float64).view(2, 3) / 5
        self.weight = nn.Parameter(md.masked_tensor(data.masked_fill(~MASK, torch.nan), MASK))
        self.bias = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.register_buffer("scale", md.masked_tensor(torch.tensor([2.0, 3.0]).double(), torch.tensor([True, True])))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) * self.scale


class MaskedInForward(nn.Module):
    """The same weight as a plain parameter, masked where it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0, dtype=torch.float64).view(2, 3) / 5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, md.as_masked_tensor(self.weight, MASK))


def batch(ranks: int) -> tuple[Any, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4 * ranks, 3, generator=generator, dtype=torch.float64)
    mask = torch.rand(4 * ranks, 3, generator=generator) < 0.7
    target = torch.randn(4 * ranks, 2, generator=generator, dtype=torch.float64)
    return md.masked_tensor(x.masked_fill(~mask, torch.nan), mask), target


@CHECKS.named("masked parameters, buffers and inputs: 20 steps are those of one process")
def curve(rank: int, ranks: int) -> None:
    for options in ({}, {"static_graph": True}, {"gradient_as_bucket_view": True}):
        alone = Holes()
        parallel = DistributedDataParallel(copy.deepcopy(alone), **options)  # type: ignore[arg-type]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (alone, parallel)]
        x, target = batch(ranks)
        for _ in range(20):
            for optimizer in optimizers:
                optimizer.zero_grad()
            expected = F.mse_loss(alone(x), target)
            expected.backward()
            mine = F.mse_loss(parallel(x[rank::ranks]), target[rank::ranks], reduction="none")
            found = md.distributed.mean_loss(mine)
            found.backward()
            md.testing.assert_close(found.detach(), expected.detach(), rtol=1e-10, atol=0)
            for optimizer in optimizers:
                optimizer.step()
        for one, other in zip(alone.parameters(), parallel.parameters(), strict=True):
            md.testing.assert_close(one.detach(), other.detach(), rtol=1e-10, atol=1e-12)
        weight: Any = parallel.module.weight
        assert torch.equal(weight.get_mask(), MASK)


@CHECKS.named("gradients keep their masks on the way through buckets, also after a scope of windows")
def gradients_in_buckets(rank: int, ranks: int) -> None:
    with md.windows("padding"):
        pass
    module = DistributedDataParallel(Holes())
    module(torch.ones(4, 3, dtype=torch.float64)).square().mean().to_tensor(0.0).backward()
    grad = module.module.weight.grad
    assert md.is_masked_tensor(grad)
    assert torch.equal(grad.get_mask(), MASK), grad


@CHECKS.named("FSDP2 refuses masked parameters, and trains plain ones that are masked in forward")
def fully_sharded(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    holes = fully_shard(Holes(), mesh=mesh)
    x, target = batch(ranks)
    raises(MaskedSemanticsError, lambda: holes(x), "which has a masked parameter of shape (2, 3)")
    alone = MaskedInForward()
    parallel = fully_shard(copy.deepcopy(alone), mesh=mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (alone, parallel)]
    for _ in range(20):
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.mse_loss(alone(x), target).backward()
        mine = F.mse_loss(parallel(x[rank::ranks]), target[rank::ranks], reduction="none")
        md.distributed.mean_loss(mine).backward()
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(alone.parameters(), parallel.parameters(), strict=True):
        sharded: Any = other
        torch.testing.assert_close(sharded.full_tensor(), one, rtol=1e-10, atol=1e-12)


@CHECKS.named("embeddings of masked indices: dense gradients are averaged")
def embeddings(rank: int, ranks: int) -> None:
    ids = md.masked_tensor(torch.tensor([1, 2 + rank, 0]), torch.tensor([True, True, False]))
    dense = DistributedDataParallel(nn.Embedding(9, 2))
    dense(ids).sum().backward()
    expected = torch.zeros(9, 2)
    expected[1], expected[2 : 2 + ranks] = 1, 1 / ranks
    torch.testing.assert_close(dense.module.weight.grad, expected)


class Tables(nn.Module):
    """An embedding and one of bags, with torch's own sparse gradients or dense ones."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 2, sparse=sparse, padding_idx=8, dtype=torch.float64)
        self.bags = nn.EmbeddingBag(7, 2, sparse=sparse, mode="sum", dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids).square().sum(1) + self.bags(ids.clamp(max=6))


def indices(rank: int, step: int) -> Any:
    """Masked indices, of which rank 1 has no valid one in step 1; those of the invalid ones are in no table."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(0, 9, (4, 3), generator=generator)
    mask = (torch.rand(4, 3, generator=generator) < 0.6) & (rank != 1 or step != 1)
    return md.masked_tensor(ids.masked_fill(~mask, 999), mask)


@CHECKS.named("sparse gradients of masked indices are torch's own, and train as dense ones")
def sparse_embeddings(rank: int, ranks: int) -> None:
    for options in ({}, {"static_graph": True}, {"gradient_as_bucket_view": True}):
        dense = Tables(sparse=False)
        dense.load_state_dict({name: torch.ones_like(value) for name, value in dense.state_dict().items()})
        tables = Tables(sparse=True)
        tables.load_state_dict(dense.state_dict())
        parallel = DistributedDataParallel(tables, **options)  # type: ignore[arg-type]
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (dense, parallel)]
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for other in range(ranks):
                (dense(indices(other, step)).sum().to_tensor(0) / ranks).backward()
            parallel(indices(rank, step)).sum().to_tensor(0).backward()
            for one, same in zip(dense.parameters(), tables.parameters(), strict=True):
                assert type(same.grad) is Tensor
                assert same.grad.layout is torch.sparse_coo
                torch.testing.assert_close(same.grad.to_dense(), one.grad)
            for optimizer in optimizers:
                optimizer.step()


@CHECKS.named("a sparse gradient lists the rows that valid indices look up, and no others")
def rows_of_sparse_gradients(rank: int, ranks: int) -> None:
    tables = Tables(sparse=True)
    parallel = DistributedDataParallel(tables)
    with parallel.no_sync():
        parallel(indices(0, 0)).sum().to_tensor(0).backward()
    parallel(indices(1, 1)).sum().to_tensor(0).backward()  # nothing valid
    looked_up = set(indices(0, 0).compressed().tolist()) - {8}
    found: Any = tables.words.weight.grad
    assert set(found.coalesce().indices()[0].tolist()) == looked_up
