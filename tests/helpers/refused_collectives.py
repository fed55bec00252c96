"""Collectives that cannot be: every rank raises, says why, and the group works afterwards unless a rank never came."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed

import masked_dispatch as md
from masked_collectives import buffer, of_all, of_rank, same
from op_registry import MaskedSemanticsError
from process_groups import Checks, impatient_group
from table_of_collectives import CASES, Kind, Trial, called, deprecated, ways

CHECKS = Checks("refused: ")


def raises(error: type[Exception], call: Callable[[], Any], *texts: str) -> None:
    with pytest.raises(error) as raised:
        call()
    missing = [text for text in texts if text not in str(raised.value)]
    assert not missing, f"{missing} not in {raised.value}"


def still_works(rank: int, ranks: int) -> None:
    x = of_rank(rank)
    distributed.all_reduce(x)
    same(x, md.accumulate(*of_all(ranks)))


DIFFERENT: dict[str, Callable[[int, int], Trial]] = {
    "dtype": lambda rank, ranks: Trial(rank, ranks, Kind(), dtype=torch.float32 if rank else torch.float64),
    "shape": lambda rank, ranks: Trial(rank, ranks, Kind(shape=(4, 5 + (rank > 0)))),
}


@CHECKS.named("dtypes and shapes that differ, in every collective")
def different(rank: int, ranks: int) -> None:
    for make in DIFFERENT.values():
        for name in [name for name in CASES if "all_to_all" not in name]:
            trial = make(rank, ranks)
            for way in ways(name, trial.kind):
                args, outputs, _ = CASES[name](trial)
                with deprecated():
                    raises(
                        ValueError,
                        functools.partial(called, name, trial, args, outputs, way),
                        "the ranks of the group have different tensors",
                        "rank 0 has float64 of shape (",
                    )
    still_works(rank, ranks)


@CHECKS.named("all_to_all: what is sent is not what is expected")
def different_pairs(rank: int, ranks: int) -> None:
    outputs = [buffer((2,)) for _ in range(ranks)]
    inputs = [buffer((3 if (rank, target) == (0, 1) else 2,)) for target in range(ranks)]
    raises(
        ValueError,
        lambda: distributed.all_to_all(outputs, inputs),
        "rank 0 sends float64 of shape (3,) to rank 1, which expects float64 of shape (2,)",
    )
    still_works(rank, ranks)


@CHECKS.named("send: what is sent is not what is expected")
def different_ends(rank: int, ranks: int) -> None:
    text = "rank 0 sends float64 of shape (3, 5) to rank 1, which expects float64 of shape (2, 5)"
    if rank == 0:
        raises(ValueError, lambda: distributed.send(of_rank(0), 1), text)
    elif rank == 1:
        raises(ValueError, lambda: distributed.recv(buffer((2, 5)), 0), text)
    still_works(rank, ranks)
    if rank == 0:
        distributed.send(of_rank(5), 1)
    elif rank == 1:
        x = buffer()
        distributed.recv(x, 0)
        same(x, of_rank(5))


@CHECKS.named("reductions without a masked meaning")
def reductions(rank: int, ranks: int) -> None:
    for name in ("BAND", "BOR", "BXOR"):
        x = of_rank(rank, dtype=torch.int64)
        raises(
            MaskedSemanticsError,
            lambda x=x, name=name: distributed.all_reduce(x, getattr(distributed.ReduceOp, name)),
            f"the reduction {name} has no masked meaning",
            "x.to_tensor(value)",
        )
    raises(
        MaskedSemanticsError,
        lambda: distributed.all_reduce(of_rank(rank, dtype=torch.int64), distributed.ReduceOp.AVG),
        "the mean of torch.int64 is not an integer",
    )
    still_works(rank, ranks)


@CHECKS.named("lists of the wrong length, and sizes that do not divide")
def lists(rank: int, ranks: int) -> None:
    wrong: dict[str, Callable[[], Any]] = {
        f"it needs a list of {ranks} tensors, one for each rank; got {ranks + 1}": lambda: distributed.all_gather(
            [buffer() for _ in range(ranks + 1)], of_rank(rank)
        ),
        "tensor 1 of the list has float64 of shape (2, 5)": lambda: distributed.all_gather(
            [buffer((3 - (r == 1), 5)) for r in range(ranks)], of_rank(rank)
        ),
        f"rows, which {ranks} ranks do not divide": lambda: distributed.all_to_all_single(
            buffer((ranks + 1, 2)), of_rank(rank, (ranks + 1, 2))
        ),
        "needs": lambda: (
            distributed.reduce_scatter_single(buffer((3,)), of_rank(rank, (ranks, 2)))
            if hasattr(distributed, "reduce_scatter_single")
            else distributed.reduce_scatter_tensor(buffer((3,)), of_rank(rank, (ranks, 2)))
        ),
    }
    for text, call in wrong.items():
        raises(MaskedSemanticsError, call, text)
    still_works(rank, ranks)


@CHECKS.named("recv from any rank")
def any_source(rank: int, ranks: int) -> None:
    raises(MaskedSemanticsError, lambda: distributed.recv(of_rank(rank)), "Name the sender, recv(x, src=rank)")


@CHECKS.named("different collectives")
def different_calls(rank: int, ranks: int) -> None:
    x = of_rank(rank)

    def call() -> Any:
        return distributed.reduce(x, 0) if rank == 0 else distributed.all_reduce(x)

    raises(ValueError, call, "rank 0 has float64 of shape (3, 5)", "calls all_reduce SUM")
    still_works(rank, ranks)


@CHECKS.named("a rank that never calls")
def absent(rank: int, ranks: int) -> None:
    group = impatient_group()
    if rank == 1:
        raises(
            RuntimeError, lambda: distributed.recv(of_rank(1), 0, group=group), "did not describe their tensors in time"
        )
        raises(
            RuntimeError,
            lambda: distributed.all_reduce(of_rank(1), group=group),
            "did not describe their tensors in time",
        )
    distributed.barrier()
    still_works(rank, ranks)


@CHECKS.named("long descriptions are sent whole")
def long(rank: int, ranks: int) -> None:
    shape = (1,) * 60 + (ranks, 3)  # more than a header holds
    outputs = [md.as_masked_tensor(torch.zeros(shape)) for _ in range(ranks)]
    x = md.as_masked_tensor(torch.ones(shape), torch.tensor([True, False, True]))
    distributed.all_to_all(outputs, [x for _ in range(ranks)])
    same(outputs[0], x)
