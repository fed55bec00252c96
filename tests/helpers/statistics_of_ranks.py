"""Statistics and losses over ranks, compared with one process that has all elements."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import masked_dispatch as md
from masked_collectives import plain_of_rank
from process_groups import Checks
from refused_collectives import raises

CHECKS = Checks("statistics: ")
FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sum": (md.distributed.sum, lambda x, dim: x.sum() if dim is None else x.sum(dim)),
    "mean": (md.distributed.mean, lambda x, dim: x.mean() if dim is None else x.mean(dim)),
    "var": (md.distributed.var, lambda x, dim: x.var() if dim is None else x.var(dim)),
}


def divisions(ranks: int) -> list[list[int]]:
    """Rows of each rank: equal, unequal, none on some; and rows on one rank alone."""
    unequal = [3 * rank + 2 for rank in range(ranks)]
    return [[4] * ranks, unequal, [0, *unequal[1:]], [5] + [0] * (ranks - 1)]


def rows_of_all(rows: list[int], dtype: torch.dtype = torch.float64) -> list[Any]:
    """Each rank's rows; whatever the division, those of rank 1 are all invalid, and so is the first column."""
    generator = torch.Generator().manual_seed(sum(rows))
    data = torch.randn(sum(rows), 5, generator=generator, dtype=torch.float64).to(dtype)
    mask = torch.rand(sum(rows), 5, generator=generator) < 0.7
    mask[:2], mask[:, 0] = True, False
    parts = zip(data.masked_fill(~mask, torch.nan).split(rows), mask.split(rows), strict=True)
    return [md.masked_tensor(d, m & (rank != 1)) for rank, (d, m) in enumerate(parts)]


@CHECKS.named("values and derivatives for every division")
def values(rank: int, ranks: int) -> None:
    for rows in divisions(ranks):
        for function, in_one in FUNCTIONS.values():
            for dim in (None, 0):
                mine = rows_of_all(rows)[rank].requires_grad_()
                whole = torch.cat(rows_of_all(rows)).requires_grad_()
                found, expected = function(mine, dim), in_one(whole, dim)
                md.testing.assert_close(found.detach(), expected.detach(), equal_nan=True)
                weight = torch.linspace(1, 2, 5, dtype=torch.float64) if dim == 0 else 1
                (found * weight).nansum().backward()
                (expected * weight).nansum().backward()
                assert whole.grad is not None
                assert mine.grad is not None
                # Every rank computes the same from the result: the derivative is that of their sum.
                md.testing.assert_close(mine.grad, whole.grad.split(rows)[rank] * ranks)
        assert int(md.distributed.count(rows_of_all(rows)[rank])) == sum(int(t.count()) for t in rows_of_all(rows))


@CHECKS.named("half precision, integers, keepdim, plain tensors and the second derivative")
def dtypes(rank: int, ranks: int) -> None:
    rows = [3] * ranks
    half = md.distributed.mean(rows_of_all(rows, torch.float16)[rank], 0, True)
    expected = torch.cat(rows_of_all(rows, torch.float16)).float().mean(0, True).half()
    md.testing.assert_close(half, expected, rtol=0, atol=0)
    whole = md.distributed.sum(md.as_masked_tensor(torch.arange(4) + rank, torch.tensor([True, True, False, rank > 0])))
    assert int(whole) == sum(1 + 2 * rank + (rank > 0) * (3 + rank) for rank in range(ranks))
    mixed = plain_of_rank(rank) if rank == 0 else md.as_masked_tensor(plain_of_rank(rank))
    md.testing.assert_close(md.distributed.var(mixed), torch.cat([plain_of_rank(r) for r in range(ranks)]).var())
    x = rows_of_all(rows)[rank].requires_grad_()
    (grad,) = torch.autograd.grad(md.distributed.var(x), x, create_graph=True)
    (second,) = torch.autograd.grad((grad**2).sum(), x)
    y = torch.cat(rows_of_all(rows)).requires_grad_()
    (grad,) = torch.autograd.grad(y.var() * ranks, y, create_graph=True)
    (expected,) = torch.autograd.grad((grad**2).sum() * 1.0, y)
    md.testing.assert_close(second, expected.split(rows)[rank])  # of what the ranks have, all of it once


@CHECKS.named("nothing valid, one element, and errors")
def ends(rank: int, ranks: int) -> None:
    nothing = md.as_masked_tensor(torch.ones(3), torch.zeros(3, dtype=torch.bool))
    for function, _ in FUNCTIONS.values():
        assert not function(nothing).get_mask()
    one = md.as_masked_tensor(torch.ones(3), torch.tensor([rank == 0, False, False]))
    variance = md.distributed.var(one)
    assert variance.get_mask()
    assert variance.isnan()
    raises(TypeError, lambda: md.distributed.mean(torch.arange(3)), "mean of torch.int64: convert first")
    other = torch.ones(2, 3 + rank)
    raises(ValueError, lambda: md.distributed.mean(other, 0), "rank 0 has float32 of shape (3,)", "rank 1 has")


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).double()


def losses_of(network: torch.nn.Module, x: Any, target: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(network(x), target, reduction="none")


@CHECKS.named("mean_loss: 20 steps under DDP are those of one process")
def curve(rank: int, ranks: int) -> None:
    for rows in divisions(ranks):
        parts = [part.mask_with(part.get_mask().any(1, keepdim=True)) for part in rows_of_all(rows)]
        targets = (torch.arange(sum(rows)) % 3).split(rows)
        weights = (torch.arange(sum(rows)).double() + 1).split(rows)
        for weighted in (False, True):
            alone = model()
            parallel = DistributedDataParallel(copy.deepcopy(alone))
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (alone, parallel)]
            for _ in range(20):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                every = losses_of(alone, torch.cat(parts), torch.cat(targets))
                weight = torch.cat(weights) if weighted else torch.ones(len(every), dtype=torch.float64)
                expected = (every * weight).sum() / md.mask_like(weight, every).sum()
                expected.backward()
                mine = losses_of(parallel, parts[rank], targets[rank])
                found = md.distributed.mean_loss(mine, weights[rank] if weighted else None)
                found.backward()
                md.testing.assert_close(found.detach(), expected.detach(), rtol=1e-10, atol=0)
                for optimizer in optimizers:
                    optimizer.step()
            for one, other in zip(alone.parameters(), parallel.parameters(), strict=True):
                md.testing.assert_close(one.detach(), other.detach(), rtol=1e-10, atol=1e-12)
