"""Collectives of tensors that know which of their positions are there; the table of collectives has every function."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed import checkpoint
from torch.distributed import group as groups
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import masked_dispatch as md
from cost_of_collectives import gathered_messages
from op_registry import MaskedSemanticsError
from process_groups import Checks
from refused_collectives import raises, still_works

CHECKS = Checks("padded: ")
LENGTHS = torch.tensor([3, 1])


def only_padded(rank: int) -> Any:
    """Two samples of another length on each rank, without missing values."""
    return md.from_lengths(torch.arange(12.0).reshape(2, 3, 2) + rank, (LENGTHS + rank).clamp(max=3))


def missing(rank: int) -> Any:
    """The same, whose second steps are missing."""
    return only_padded(rank).mask_with(torch.tensor([[True], [False], [True]]))


def buffer(shape: tuple[int, ...] = (2, 3, 2)) -> Any:
    return md.masked_tensor(torch.zeros(shape))


def same(found: Any, expected: Any) -> None:
    md.testing.assert_close(found, expected, rtol=0, atol=0)
    assert found._extent.places == expected._extent.places
    assert found._extent.is_mask == expected._extent.is_mask
    assert found.extent.tolist() == expected.extent.tolist()


@CHECKS.named("a batch that is only padded stays one, and sends no boolean of its extent")
def only_padded_batches(rank: int, ranks: int) -> None:
    with gathered_messages() as lengths:
        outputs = [buffer() for _ in range(ranks)]
        distributed.all_gather(outputs, only_padded(rank))
    with gathered_messages() as without:
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


@CHECKS.named("one rank with missing values, and one without")
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


@CHECKS.named("several dimensions, merged and joined ones, scores of pairs")
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


@CHECKS.named("a reduction of what was reduced from samples, with and without missing values")
def of_reduced(rank: int, ranks: int) -> None:
    for r in range(2):
        x = (missing(rank) if rank == r else only_padded(rank)).mean(1)
        distributed.all_reduce(x)
        assert x.extent is None
        assert x.get_mask().all()


@CHECKS.named("what is received replaces what was known, but not under a base")
def replaced(rank: int, ranks: int) -> None:
    x = missing(rank)
    distributed.broadcast(x, 1)
    same(x, missing(1))
    left = md.padded(md.from_lengths(torch.ones(2, 3, 2), LENGTHS), torch.ones(2, 3, 1, dtype=torch.bool), dim=1)
    x = missing(1) if rank == 0 else left
    distributed.broadcast(x, 0)
    same(x, missing(1))
    lengths = md.from_lengths(torch.zeros(2, 3, 2), torch.tensor([3, 1]) if rank else torch.tensor([1, 3]))
    beside = lengths[:, :, 0]
    distributed.broadcast(lengths, 0)  # both are their masks
    same(lengths, md.from_lengths(torch.zeros(2, 3, 2), torch.tensor([1, 3])))
    same(beside, lengths[:, :, 0])
    rows = md.from_lengths(torch.zeros(2, 3), torch.tensor([1, 2]))
    distributed.broadcast(rows[rank : rank + 1], 1)  # of length 2, into a part of length 1
    expected = [[True, rank == 0, False], [True, True, False]]
    assert rows.extent.tolist() == rows.get_mask().tolist() == expected
    base = buffer((2, 2, 3, 2))
    view = missing(0) if rank == 0 else base[0]
    if rank == 0:
        distributed.broadcast(view, 0)
    else:
        raises(MaskedSemanticsError, lambda: distributed.broadcast(view, 0), "its base cannot learn of them")


@CHECKS.named("statistics over ranks that would keep positions")
def statistics(rank: int, ranks: int) -> None:
    x, per_step = only_padded(rank), "keeps dimensions of which each rank knows which positions are there"
    for function in (md.distributed.sum, md.distributed.mean, md.distributed.var, md.distributed.count):
        raises(MaskedSemanticsError, lambda f=function: f(x, 2), per_step)
        raises(MaskedSemanticsError, lambda f=function: f(x if rank else x.without_extent(), 0), per_step)
        still_works(rank, ranks)
    everything = [only_padded(r).sum((0, 1)) for r in range(ranks)]
    md.testing.assert_close(md.distributed.sum(x, (0, 1)), md.accumulate(*everything), rtol=1e-5, atol=0)
    md.testing.assert_close(md.distributed.sum(x, 1), md.accumulate(*[only_padded(r).sum(1) for r in range(ranks)]))


@CHECKS.named("complex numbers")
def of_complex_numbers(rank: int, ranks: int) -> None:
    x = missing(rank).to(torch.complex64)
    distributed.all_reduce(x)
    same(x, md.accumulate(*[missing(r).to(torch.complex64) for r in range(ranks)]))


@CHECKS.named("pairs that know each something else")
def pairs(rank: int, ranks: int) -> None:
    def sent(r: int, to: int) -> Any:
        return missing(r) if (r + to) % 2 else md.masked_tensor(torch.ones(2, 3, 2) * r)

    outputs = [buffer() for _ in range(ranks)]
    distributed.all_to_all(outputs, [sent(rank, to) for to in range(ranks)])
    for r, output in enumerate(outputs):
        md.testing.assert_close(output, sent(r, rank), rtol=0, atol=0)
        assert (output.extent is None) == (sent(r, rank).extent is None)


@CHECKS.named("rows that number positions do not go to different ranks")
def rows_of_positions(rank: int, ranks: int) -> None:
    x, text = missing(rank).transpose(0, 1)[:2].contiguous(), "rows of a tensor of shape (2, 2, 2), which number the"
    raises(MaskedSemanticsError, lambda: functional.all_to_all_single(x, [1] * 2, [1] * 2, groups.WORLD), text)
    raises(
        MaskedSemanticsError,
        lambda: distributed.all_gather_into_tensor(buffer((2 * ranks, 2, 2)), x),
        "dimension 0 of a tensor of shape (2, 2, 2) numbers the positions of its samples",
    )
    still_works(rank, ranks)


@CHECKS.named("rows that share their samples go to different ranks")
def rows_of_the_same_samples(rank: int, ranks: int) -> None:
    def of(r: int) -> Any:
        return missing(r) + torch.arange(4.0).reshape(4, 1, 1, 1)

    found = functional.all_to_all_single(of(rank), [2] * 2, [2] * 2, groups.WORLD)
    for r, part in enumerate(found.chunk(ranks)):
        md.testing.assert_close(part, of(r)[2 * rank : 2 * rank + 2], rtol=0, atol=0, check_extent=True)
    found = functional.reduce_scatter_tensor(of(rank), "sum", 0, groups.WORLD)
    expected = md.accumulate(*map(of, range(ranks)))[2 * rank : 2 * rank + 2]
    md.testing.assert_close(found, expected, rtol=0, atol=0, check_extent=True)


@CHECKS.named("ranks that know differently which positions are there")
def different(rank: int, ranks: int) -> None:
    turned = md.padded(only_padded(0).without_extent().flip(1), dim=1)
    for other, text in (
        (turned, "positions in a row along 1"),
        (turned.without_extent(), "(2, 3, 2) without an extent"),
        (missing(0).transpose(1, 2).reshape(2, 3, 2), "any positions along 2"),
    ):
        x = other if rank else missing(rank)
        calls: list[Callable[[], Any]] = [
            lambda x=x: distributed.all_reduce(x),
            lambda x=x: distributed.reduce(x, 0),
            lambda x=x: distributed.reduce_scatter(buffer(), [x] * ranks),
            lambda x=x: functional.all_reduce(x, "sum", groups.WORLD),
        ]
        if other is not turned:  # tensors that stay apart may have their samples elsewhere
            outputs = [buffer() for _ in range(ranks)]
            calls += [
                lambda x=x, outputs=outputs: distributed.all_gather(outputs, x),
                lambda x=x: distributed.all_gather_into_tensor(buffer((2 * ranks, 3, 2)), x),
                lambda x=x, outputs=outputs: distributed.gather(x, outputs if rank == 0 else None, 0),
                lambda x=x: functional.all_gather_tensor(x, 0, groups.WORLD),
            ]
        for call in calls:
            raises(
                ValueError,
                call,
                "the ranks of the group know differently which positions of their tensors are there: rank 0 has "
                "float32 of shape (2, 3, 2) whose positions are there by samples along 0, first positions along 1",
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


@CHECKS.named("distributed tensors: placed, moved, taken apart, and used")
def of_distributed_tensors(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    for make in (missing, only_padded):
        x = make(0)
        for first in (Shard(0), Shard(1), Shard(2), Replicate()):
            placed = md.distributed.distribute(make(rank), mesh, [first])
            same(md.distributed.full_tensor(placed), x)
            for second in (Shard(0), Shard(2), Replicate()):
                moved = md.distributed.redistribute(placed, mesh, [second])
                same(md.distributed.full_tensor(moved), x)
                local = md.distributed.to_local(moved)
                part = x.chunk(ranks, second.dim)[rank] if isinstance(second, Shard) else x
                same(local, part)
                same(md.distributed.full_tensor(md.distributed.from_local(local, mesh, [second])), x)
        raises(
            MaskedSemanticsError,
            lambda x=x: md.distributed.to_local(md.distributed.distribute(x, mesh, [Shard(1)])),
            "to_local of a tensor of shape (2, 3, 2) with Shard(dim=1): dimension 1 numbers the positions",
        )
        for placement in (Shard(0), Replicate()):
            placed = md.distributed.distribute(x, mesh, [placement])
            for function in USES:
                found, expected = md.distributed.full_tensor(function(placed)), function(x)
                md.testing.assert_close(found, expected)
                assert (found.extent is None) == (expected.extent is None)
                if found.extent is not None:
                    assert found.extent.tolist() == expected.extent.tolist()


USES: list[Callable[[Any], Any]] = [
    lambda x: x * 2 + x,
    lambda x: x.mean(1),
    lambda x: x.sum(2),
    lambda x: x.softmax(1),
    lambda x: x.transpose(1, 2),
]


@CHECKS.named("distributed tensors: ranks that know differently, and one that has missing values")
def of_distributed_tensors_that_differ(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    x = only_padded(0) if rank else missing(0)
    whole = md.distributed.full_tensor(md.distributed.from_local(x, mesh, [Shard(0)]))
    md.testing.assert_close(whole, torch.cat([missing(0), only_padded(0).without_extent()]), rtol=0, atol=0)
    assert whole.extent.tolist() == torch.cat([missing(0), only_padded(0)]).extent.tolist()
    y = x.transpose(1, 2).reshape(2, 3, 2) if rank else x
    for call in (md.distributed.distribute, md.distributed.from_local):
        raises(
            ValueError, lambda call=call: call(y, mesh, [Shard(0)]), "know differently which positions", "rank 0 has"
        )
    z = x if rank else x.without_extent()
    raises(
        ValueError, lambda: md.distributed.distribute(z, mesh, [Shard(0)]), "rank 0 has float32", "without an extent"
    )


@CHECKS.named("tensor parallel modules")
def of_parallel_modules(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    parallel = parallelize_module(copy.deepcopy(net), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for x in (missing(0), only_padded(0)):
        found, expected = parallel(x), net(x)
        md.testing.assert_close(found, expected, check_extent=True)
        assert found._extent.places == expected._extent.places
        assert found._extent.is_mask == expected._extent.is_mask
    norm = parallelize_module(nn.LayerNorm(2), mesh, SequenceParallel())
    raises(MaskedSemanticsError, lambda: norm(only_padded(0)), "dimension 1 numbers the positions of its samples")


@CHECKS.named("a checkpoint of distributed tensors is refused")
def of_what_is_refused(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    placed = {"x": md.distributed.distribute(missing(rank), mesh, [Shard(0)])}
    with tempfile.TemporaryDirectory() as folder:
        raises(
            checkpoint.CheckpointException,  # type: ignore[arg-type]
            lambda: checkpoint.save(placed, checkpoint_id=folder, no_dist=True),
            "and a checkpoint of distributed tensors does not carry that",
        )
    still_works(rank, ranks)
