"""Collectives of tensors that know which of their positions are there; the table of collectives has every function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import _functional_collectives as functional
from torch.distributed import group as groups

import masked_dispatch as md
from op_registry import MaskedSemanticsError
from process_groups import Check
from refused_collectives import raises, still_works

CHECKS: dict[str, Check] = {}
LENGTHS = torch.tensor([3, 1])


def check(name: str) -> Callable[[Check], Check]:
    def add(function: Check) -> Check:
        CHECKS[f"padded: {name}"] = function
        return function

    return add


def only_padded(rank: int) -> Any:
    """Two samples of another length on each rank, without missing values."""
    return md.padded(md.from_lengths(torch.arange(12.0).reshape(2, 3, 2) + rank, (LENGTHS + rank).clamp(max=3)))


def missing(rank: int) -> Any:
    """The same, whose second steps are missing."""
    return only_padded(rank).mask_with(torch.tensor([[True], [False], [True]]))


def buffer(shape: tuple[int, ...] = (2, 3, 2)) -> Any:
    return md.masked_tensor(torch.zeros(shape))


def same(found: Any, expected: Any) -> None:
    md.testing.assert_close(found, expected, rtol=0, atol=0)
    assert found._extent.known == expected._extent.known
    assert found._extent.is_mask == expected._extent.is_mask
    assert found.extent.tolist() == expected.extent.tolist()


@check("a batch that is only padded stays one, and sends no boolean of its extent")
def only_padded_batches(rank: int, ranks: int) -> None:
    with counted_messages() as lengths:
        outputs = [buffer() for _ in range(ranks)]
        distributed.all_gather(outputs, only_padded(rank))
    with counted_messages() as without:
        distributed.all_gather([buffer() for _ in range(ranks)], only_padded(rank).without_extent())
    assert lengths == without
    for r, output in enumerate(outputs):
        same(output, only_padded(r))
    x = only_padded(rank)
    distributed.all_reduce(x)
    assert x._extent.is_mask
    assert x.extent.tolist() == x.get_mask().tolist() == only_padded(1).get_mask().tolist()
    whole = buffer((2 * ranks, 3, 2))
    distributed.all_gather_into_tensor(whole, only_padded(rank))
    same(whole, torch.cat([only_padded(r) for r in range(ranks)]))


class counted_messages:
    """The lengths of the messages that are gathered from all ranks inside."""

    def __enter__(self) -> list[int]:
        lengths: list[int] = []
        self.original = original = distributed.all_gather_single

        def counting(output: Tensor, message: Tensor, **kwargs: Any) -> Any:
            lengths.append(message.numel())
            return original(output, message, **kwargs)

        distributed.all_gather_single = counting
        return lengths

    def __exit__(self, *_: object) -> None:
        distributed.all_gather_single = self.original


@check("one rank with missing values, and one without")
def one_with_missing_values(rank: int, ranks: int) -> None:
    def of(r: int) -> Any:
        return missing(r) if r else only_padded(r)

    outputs = [buffer() for _ in range(ranks)]
    distributed.all_gather(outputs, of(rank))
    for r, output in enumerate(outputs):
        assert output.extent.tolist() == of(r).extent.tolist()
        md.testing.assert_close(output, of(r), rtol=0, atol=0)
    x = of(rank)
    distributed.all_reduce(x)
    same(x, md.accumulate(*map(of, range(ranks))))
    x = functional.all_reduce(of(rank), "sum", groups.WORLD)
    same(x, md.accumulate(*map(of, range(ranks))))


@check("several dimensions, merged and joined ones, scores of pairs")
def several_dimensions(rank: int, ranks: int) -> None:
    joined = [torch.cat([missing(r), torch.ones(2, 2, 2)], 1) for r in range(ranks)]
    scores = [only_padded(r) @ only_padded(r).transpose(1, 2) for r in range(ranks)]
    merged = [missing(r).flatten(0, 1) for r in range(ranks)]
    for tensors in (joined, scores, merged):
        outputs = [buffer(tuple(tensors[0].shape)) for _ in range(ranks)]
        distributed.all_gather(outputs, tensors[rank])
        for found, expected in zip(outputs, tensors, strict=True):
            same(found, expected)
    raises(
        MaskedSemanticsError,
        lambda: distributed.all_reduce(scores[rank]),
        "a reduction SUM over ranks: the tensors know by 2 booleans which of their positions are there",
    )


@check("a reduction of what was reduced from samples, with and without missing values")
def of_reduced(rank: int, ranks: int) -> None:
    for r in range(2):
        x = (missing(rank) if rank == r else only_padded(rank)).mean(1)
        distributed.all_reduce(x)
        assert x.extent is None
        assert x.get_mask().all()


@check("what is received replaces what was known, but not under a base")
def replaced(rank: int, ranks: int) -> None:
    x = missing(rank)
    distributed.broadcast(x, 1)
    same(x, missing(1))
    left = md.padded(md.from_lengths(torch.ones(2, 3, 2), LENGTHS), torch.ones(2, 3, 1, dtype=torch.bool), dim=1)
    x = missing(1) if rank == 0 else left
    distributed.broadcast(x, 0)
    same(x, missing(1))
    base = buffer((2, 2, 3, 2))
    view = missing(0) if rank == 0 else base[0]
    if rank == 0:
        distributed.broadcast(view, 0)
    else:
        raises(MaskedSemanticsError, lambda: distributed.broadcast(view, 0), "its base cannot learn of them")


@check("complex numbers")
def of_complex_numbers(rank: int, ranks: int) -> None:
    x = missing(rank).to(torch.complex64)
    distributed.all_reduce(x)
    same(x, md.accumulate(*[missing(r).to(torch.complex64) for r in range(ranks)]))


@check("pairs that know each something else")
def pairs(rank: int, ranks: int) -> None:
    def sent(r: int, to: int) -> Any:
        return missing(r) if (r + to) % 2 else md.masked_tensor(torch.ones(2, 3, 2) * r)

    outputs = [buffer() for _ in range(ranks)]
    distributed.all_to_all(outputs, [sent(rank, to) for to in range(ranks)])
    for r, output in enumerate(outputs):
        md.testing.assert_close(output, sent(r, rank), rtol=0, atol=0)
        assert (output.extent is None) == (sent(r, rank).extent is None)


@check("rows that number positions do not go to different ranks")
def rows_of_positions(rank: int, ranks: int) -> None:
    x, text = missing(rank).transpose(0, 1)[:2].contiguous(), "rows of a tensor of shape (2, 2, 2), which number the"
    raises(MaskedSemanticsError, lambda: functional.all_to_all_single(x, [1] * 2, [1] * 2, groups.WORLD), text)
    raises(
        MaskedSemanticsError,
        lambda: distributed.all_gather_into_tensor(buffer((2 * ranks, 2, 2)), x),
        "dimension 0 of a tensor of shape (2, 2, 2) numbers the positions of its samples",
    )
    still_works(rank, ranks)


@check("ranks that know differently which positions are there")
def different(rank: int, ranks: int) -> None:
    turned = md.padded(only_padded(0).without_extent().flip(1), dim=1)
    for other, text in (
        (turned, "positions in a row along 1"),
        (turned.without_extent(), "(2, 3, 2) without an extent"),
        (missing(0).transpose(1, 2).reshape(2, 3, 2), "any positions along 2"),
    ):
        x = other if rank else missing(rank)
        outputs = [buffer() for _ in range(ranks)]
        calls: list[Callable[[], Any]] = [
            lambda x=x: distributed.all_reduce(x),
            lambda x=x: distributed.reduce(x, 0),
            lambda x=x, outputs=outputs: distributed.all_gather(outputs, x),
            lambda x=x: distributed.all_gather_into_tensor(buffer((2 * ranks, 3, 2)), x),
            lambda x=x, outputs=outputs: distributed.gather(x, outputs if rank == 0 else None, 0),
            lambda x=x: distributed.reduce_scatter(buffer(), [x] * ranks),
            lambda x=x: functional.all_reduce(x, "sum", groups.WORLD),
        ]
        for call in calls:
            raises(
                ValueError,
                call,
                "the ranks of the group know differently which positions of their tensors are there: rank 0 has "
                "float32 of shape (2, 3, 2) whose positions are there by samples along 0, first positions along 1; rank",
                text,
                "Pad their batches alike",
            )
            still_works(rank, ranks)
    parts = [missing(rank), *[turned] * (ranks - 1)]
    raises(
        MaskedSemanticsError,
        lambda: distributed.reduce_scatter(buffer(), parts),
        "reduce_scatter SUM on rank 0: its tensors know differently which of their positions are there",
    )
    still_works(rank, ranks)
