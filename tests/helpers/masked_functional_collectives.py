"""torch's functional collectives on masked tensors, with their derivatives; compared as in masked_collectives."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed import group as groups

import masked_dispatch as md
from masked_collectives import FLOATS, REDUCTIONS, expected_of, of_all, of_rank, same
from process_groups import Check

CHECKS: dict[str, Check] = {}
WIDE = (4, 4)


def check(name: str) -> Callable[[Check], Check]:
    def add(function: Check) -> Check:
        CHECKS[f"functional {name}"] = function
        return function

    return add


@contextmanager
def deprecated() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def all_reduces(rank: int, ranks: int, op: str) -> None:
    for dtype in FLOATS:
        x = of_rank(rank, dtype=dtype)
        name = "avg" if op == "AVG" else op.lower()
        same(functional.all_reduce(x, name, groups.WORLD), expected_of(op, of_all(ranks, dtype=dtype)))
        same(x, of_rank(rank, dtype=dtype))


for op in REDUCTIONS:
    CHECKS[f"functional all_reduce {op}"] = functools.partial(all_reduces, op=op)


def derivative(
    rank: int, ranks: int, call: Callable[[Tensor], Tensor], in_one: Callable[[list[Any]], list[Any]]
) -> None:
    """Compare with the derivative of the sum over ranks, when one process computes all of it."""
    x = of_rank(rank, WIDE).requires_grad_()
    weights = [torch.randn(16 * ranks, generator=torch.Generator().manual_seed(r)).double() for r in range(ranks)]

    def loss(y: Any, r: int) -> Tensor:
        return (y.reshape(-1) ** 2 * weights[r][: y.numel()]).sum()

    loss(call(x), rank).backward()
    alone = [t.requires_grad_() for t in of_all(ranks, WIDE)]
    md.accumulate(*[loss(y, r) for r, y in enumerate(in_one(alone))]).backward()
    assert x.grad is not None
    md.testing.assert_close(x.grad, alone[rank].grad)


@check("all_reduce: derivative")
def of_all_reduce(rank: int, ranks: int) -> None:
    derivative(
        rank,
        ranks,
        lambda x: functional.all_reduce(x, "sum", groups.WORLD),
        lambda all_: [md.accumulate(*all_)] * ranks,
    )
    derivative(
        rank,
        ranks,
        lambda x: functional.all_reduce(x, "avg", groups.WORLD),
        lambda all_: [md.mean(torch.stack(all_), 0)] * ranks,
    )


@check("all_gather: value and derivative")
def of_all_gather(rank: int, ranks: int) -> None:
    with deprecated():
        derivative(
            rank,
            ranks,
            lambda x: functional.all_gather_tensor(x, 0, groups.WORLD),
            lambda all_: [torch.cat(all_)] * ranks,
        )
        for dim in (0, 1):
            gathered = functional.all_gather_tensor(of_rank(rank), dim, groups.WORLD)
            same(gathered, torch.cat(of_all(ranks), dim))


@check("reduce_scatter: value and derivative")
def of_reduce_scatter(rank: int, ranks: int) -> None:
    def in_one(tensors: list[Any]) -> list[Any]:
        return list(md.accumulate(*tensors).chunk(ranks))

    with deprecated():
        derivative(rank, ranks, lambda x: functional.reduce_scatter_tensor(x, "sum", 0, groups.WORLD), in_one)
        for dim in (0, 1):
            part = functional.reduce_scatter_tensor(of_rank(rank, WIDE), "avg", dim, groups.WORLD)
            same(part, md.mean(torch.stack(of_all(ranks, WIDE)), 0).chunk(ranks, dim)[rank])


@check("all_to_all_single: value and derivative")
def of_all_to_all(rank: int, ranks: int) -> None:
    rows = [4 // ranks] * ranks

    def call(x: Tensor) -> Tensor:
        return functional.all_to_all_single(x, rows, rows, groups.WORLD)

    def in_one(tensors: list[Any]) -> list[Any]:
        return [torch.cat([t.split(rows)[r] for t in tensors]) for r in range(ranks)]

    derivative(rank, ranks, call, in_one)
    same(call(of_rank(rank, WIDE)), in_one(of_all(ranks, WIDE))[rank])


@check("broadcast")
def of_broadcast(rank: int, ranks: int) -> None:
    same(functional.broadcast(of_rank(rank), 1, groups.WORLD), of_rank(1))


@check("coalesced, and in place")
def of_coalesced(rank: int, ranks: int) -> None:
    tensors = [of_rank(rank, seed=seed) for seed in range(2)]
    expected = [md.accumulate(*[of_rank(r, seed=seed) for r in range(ranks)]) for seed in range(2)]
    for result, want in zip(functional.all_reduce_coalesced(tensors, "sum", groups.WORLD), expected, strict=True):
        same(result, want)
    x = of_rank(rank)
    functional.all_reduce_inplace(x, "sum", groups.WORLD)
    same(x, expected[0])


@check("plain tensors keep torch's asynchronous wrapper")
def of_plain(rank: int, ranks: int) -> None:
    result = functional.all_reduce(torch.ones(3), "sum", groups.WORLD)
    assert type(result).__name__ == "AsyncCollectiveTensor"
    assert (result == ranks).all()
