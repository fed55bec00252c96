"""torch.distributed's functions on masked tensors, each compared with what one process computes of all ranks' tensors.

Every rank can make the tensor of every other rank. What is stored where a tensor is invalid is NaN, or as bad, and
differs between ranks.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

import masked_dispatch as md
from masked_dispatch.testing import assert_close
from process_groups import Check

SHAPE = (3, 5)
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
ALL_DTYPES = (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool)
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "SUM": lambda stack: md.accumulate(*stack),
    "AVG": lambda stack: md.mean(stack, 0),
    "MIN": lambda stack: md.amin(stack, 0),
    "MAX": lambda stack: md.amax(stack, 0),
    "PRODUCT": lambda stack: md.prod(stack, 0, dtype=stack.dtype),
}

CHECKS: dict[str, Check] = {}


def check(name: str) -> Callable[[Check], Check]:
    def add(function: Check) -> Check:
        assert name not in CHECKS
        CHECKS[name] = function
        return function

    return add


def of_rank(rank: int, shape: Sequence[int] = SHAPE, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """The tensor of a rank: its first element is invalid on all ranks, its last valid on all."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    data = torch.randint(0, 9, tuple(shape), generator=generator).to(dtype)
    mask = torch.rand(tuple(shape), generator=generator) < 0.5
    mask.view(-1)[0], mask.view(-1)[-1] = False, True
    garbage = torch.nan if dtype.is_floating_point else rank
    return md.as_masked_tensor(data.masked_fill(~mask, garbage), mask)


def plain_of_rank(rank: int, shape: Sequence[int] = SHAPE) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(tuple(shape)) + rank


def of_all(ranks: int, shape: Sequence[int] = SHAPE, dtype: torch.dtype = torch.float64) -> list[Any]:
    return [of_rank(rank, shape, dtype) for rank in range(ranks)]


def buffer(shape: Sequence[int] = SHAPE) -> Any:
    """A masked tensor to be written to."""
    return md.as_masked_tensor(torch.full(tuple(shape), -9.0, dtype=torch.float64), torch.rand(tuple(shape)) < 0.5)


def plain_buffer(shape: Sequence[int] = SHAPE) -> Tensor:
    return torch.full(tuple(shape), -9.0, dtype=torch.float64)


def updated(arrived: Tensor) -> Tensor:
    """What a plain buffer holds afterwards."""
    return arrived.to_tensor(-9)  # type: ignore[attr-defined]


def same(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected), (actual, expected)
    assert_close(actual, expected, rtol=0, atol=0)
    if isinstance(expected, md.MaskedTensor):
        assert known_of(actual) == known_of(expected)


def known_of(x: Any) -> Any:
    """What is known of the extent, and where it is; None without one."""
    return None if x.extent is None else (x._extent.known, x.extent.tolist())


def all_same(actual: Sequence[Any], expected: Sequence[Any]) -> None:
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        same(one, other)


def expected_of(op: str, tensors: Sequence[Any]) -> Any:
    """The reduction in one process; half precision in float32, rounded once."""
    dtype = tensors[0].dtype
    if dtype is torch.bool:
        tensors = [t.to(torch.uint8) for t in tensors]
        op = {"SUM": "MAX", "PRODUCT": "MIN"}.get(op, op)
    if dtype in (torch.float16, torch.bfloat16):
        tensors = [t.float() for t in tensors]
    return REDUCTIONS[op](torch.stack(list(tensors))).to(dtype)


def reduction(op: str) -> Any:
    return getattr(distributed.ReduceOp, op)


# -------------------------------------------------------------------------------------------------------- reductions


def all_reduces(rank: int, ranks: int, op: str) -> None:
    for dtype in FLOATS if op == "AVG" else ALL_DTYPES:
        x = of_rank(rank, dtype=dtype)
        distributed.all_reduce(x, reduction(op))
        same(x, expected_of(op, of_all(ranks, dtype=dtype)))
    whole = md.as_masked_tensor(plain_of_rank(rank))
    distributed.all_reduce(whole, reduction(op))
    same(whole, expected_of(op, [md.as_masked_tensor(plain_of_rank(r)) for r in range(ranks)]))


for op in REDUCTIONS:
    CHECKS[f"all_reduce {op}"] = functools.partial(all_reduces, op=op)


@check("all_reduce: one rank with nothing valid, one with everything")
def extremes(rank: int, ranks: int) -> None:
    tensors = [md.as_masked_tensor(plain_of_rank(r), torch.full(SHAPE, r == 0)) for r in range(ranks)]
    x = tensors[rank]
    distributed.all_reduce(x)
    same(x, md.as_masked_tensor(plain_of_rank(0), torch.full(SHAPE, True)))


@check("all_reduce: views, strides, sizes 0 and 1")
def shapes(rank: int, ranks: int) -> None:
    base = of_rank(rank, (4, 6))
    distributed.all_reduce(base.t()[1:3])
    expected = of_rank(rank, (4, 6))
    expected[:, 1:3] = expected_of("SUM", [t[:, 1:3] for t in of_all(ranks, (4, 6))])
    same(base, expected)
    for shape in [(), (0,), (1,), (7,), (2, 0, 3), (33,)]:
        x = md.as_masked_tensor(torch.zeros(0).view(shape)) if 0 in shape else of_rank(rank, shape)
        distributed.all_reduce(x)
        if 0 not in shape:
            same(x, expected_of("SUM", of_all(ranks, shape)))


@check("all_reduce: in the memory of a large tensor, seen by its base and its copies not")
def large(rank: int, ranks: int) -> None:
    shape = (3, 20000)
    for op in REDUCTIONS:
        base, kept = of_rank(rank, shape), of_rank(rank, shape)
        copy, version = base.clone(), base._version
        distributed.all_reduce(base[1:], reduction(op))
        kept[1:] = expected_of(op, [t[1:] for t in of_all(ranks, shape)])
        same(base, kept)
        same(copy, of_rank(rank, shape))
        assert base._version > version


@check("all_reduce: complex")
def complex_numbers(rank: int, ranks: int) -> None:
    def of(r: int) -> Any:
        x = of_rank(r, (2, 4))
        return md.as_masked_tensor(torch.complex(x.get_data(), x.get_data() + 1), x.get_mask())

    x = of(rank)
    distributed.all_reduce(x[:, 1:])
    expected = of(rank)
    expected[:, 1:] = md.accumulate(*[of(r)[:, 1:] for r in range(ranks)])
    same(x, expected)


@check("all_reduce: a parameter that requires grad stays a leaf")
def parameter(rank: int, ranks: int) -> None:
    x = torch.nn.Parameter(of_rank(rank))
    distributed.all_reduce(x.data)
    distributed.all_reduce(x)
    assert x.is_leaf
    assert x.requires_grad


@check("all_reduce: a group of some ranks")
def subgroup(rank: int, ranks: int) -> None:
    group = distributed.new_group([1])
    x = of_rank(rank)
    if rank == 1:
        distributed.all_reduce(x, group=group)
    same(x, of_rank(rank))


@check("all_reduce_coalesced")
def coalesced(rank: int, ranks: int) -> None:
    tensors = [of_rank(rank, seed=seed) for seed in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        # The future that it returns is complete when nobody else waits.
        distributed.all_reduce_coalesced(tensors, async_op=True).wait()
    all_same(tensors, [md.accumulate(*[of_rank(r, seed=seed) for r in range(ranks)]) for seed in range(2)])


@check("reduce")
def reduces(rank: int, ranks: int) -> None:
    for op in REDUCTIONS:
        x = of_rank(rank)
        distributed.reduce(x, 1, reduction(op))
        same(x, expected_of(op, of_all(ranks)) if rank == 1 else of_rank(rank))


@check("reduce_scatter")
def reduce_scatters(rank: int, ranks: int) -> None:
    for op in REDUCTIONS:
        expected = expected_of(op, [of_rank(r, seed=rank) for r in range(ranks)])
        parts = [of_rank(rank, seed=seed) for seed in range(ranks)]
        for output in (buffer(), plain_buffer()):
            distributed.reduce_scatter(output, parts, reduction(op))
            same(output, expected if isinstance(output, md.MaskedTensor) else updated(expected))
    mixed: list[Any] = [plain_of_rank(rank), *[of_rank(rank, seed=seed) for seed in range(1, ranks)]]
    output = buffer()
    distributed.reduce_scatter(output, mixed)
    if rank == 0:
        same(output, md.accumulate(*[md.as_masked_tensor(plain_of_rank(r)) for r in range(ranks)]))


@check("reduce_scatter_tensor")
def reduce_scatter_tensors(rank: int, ranks: int) -> None:
    shape = (3 * ranks, 5)
    for call in newest("reduce_scatter_single", "reduce_scatter_tensor"):
        for output in (buffer(), plain_buffer()):
            call(output, of_rank(rank, shape))
            expected = expected_of("SUM", of_all(ranks, shape))[3 * rank : 3 * rank + 3]
            same(output, expected if isinstance(output, md.MaskedTensor) else updated(expected))


def newest(*names: str) -> list[Callable[..., Any]]:
    """The function that torch names first of those that it has; the others are deprecated."""
    return [getattr(distributed, next(name for name in names if hasattr(distributed, name)))]


# --------------------------------------------------------------------------------------------------------- movements


@check("broadcast")
def broadcasts(rank: int, ranks: int) -> None:
    for dtype in (*ALL_DTYPES, torch.int16, torch.complex64):
        x = of_rank(rank, dtype=dtype)
        distributed.broadcast(x, 1)
        same(x, of_rank(1, dtype=dtype))
    x = buffer()
    work = distributed.broadcast(md.as_masked_tensor(plain_of_rank(0)) if rank == 0 else x, 0, async_op=True)
    assert work is not None
    work.wait()
    if rank:
        same(x, md.as_masked_tensor(plain_of_rank(0)))


@check("all_gather")
def all_gathers(rank: int, ranks: int) -> None:
    outputs = [buffer() for _ in range(ranks)]
    distributed.all_gather(outputs, of_rank(rank))
    all_same(outputs, of_all(ranks))
    plain = [plain_buffer() for _ in range(ranks)]
    distributed.all_gather(plain, of_rank(rank))
    all_same(plain, [updated(t) for t in of_all(ranks)])
    distributed.all_gather(outputs, plain_of_rank(rank))
    all_same(outputs, [md.as_masked_tensor(plain_of_rank(r)) for r in range(ranks)])


@check("all_gather_into_tensor")
def all_gathers_into_tensor(rank: int, ranks: int) -> None:
    for call in newest("all_gather_single", "all_gather_into_tensor"):
        for shape in [(3 * ranks, 5), (ranks, 3, 5)]:
            for output in (buffer(shape), plain_buffer(shape)):
                call(output, of_rank(rank))
                expected = torch.stack(of_all(ranks)).view(shape)
                same(output, expected if isinstance(output, md.MaskedTensor) else updated(expected))


@check("gather")
def gathers(rank: int, ranks: int) -> None:
    outputs: Any = [buffer(), *[plain_buffer() for _ in range(ranks - 1)]] if rank == 1 else None
    distributed.gather(of_rank(rank), outputs, 1)
    if rank == 1:
        same(outputs[0], of_rank(0))
        all_same(outputs[1:], [updated(of_rank(r)) for r in range(1, ranks)])
    outputs = [buffer() for _ in range(ranks)] if rank == 0 else None
    distributed.gather(plain_of_rank(0) if rank == 0 else md.as_masked_tensor(plain_of_rank(rank)), outputs)
    if rank == 0:
        all_same(outputs, [md.as_masked_tensor(plain_of_rank(r)) for r in range(ranks)])


@check("gather_into_tensor")
def gathers_into_tensor(rank: int, ranks: int) -> None:
    if not hasattr(distributed, "gather_single"):  # since torch 2.15
        return
    for output in (buffer((3 * ranks, 5)), plain_buffer((ranks, 3, 5))):
        distributed.gather_single(of_rank(rank), output if rank == 1 else None, 1)
        expected = torch.stack(of_all(ranks)).view(output.shape)
        if rank == 1:
            same(output, expected if isinstance(output, md.MaskedTensor) else updated(expected))


@check("scatter")
def scatters(rank: int, ranks: int) -> None:
    parts = [of_rank(r, seed=7) for r in range(ranks)] if rank == 0 else None
    output = plain_buffer() if rank == 0 else buffer()
    distributed.scatter(output, parts)
    expected = of_rank(rank, seed=7)
    same(output, updated(expected) if rank == 0 else expected)


@check("all_to_all")
def all_to_alls(rank: int, ranks: int) -> None:
    def sent(source: int, target: int) -> Any:
        return of_rank(source, (2 + source, 1 + target), seed=target)

    outputs = [buffer((2 + source, 1 + rank)) for source in range(ranks)]
    distributed.all_to_all(outputs, [sent(rank, target) for target in range(ranks)])
    all_same(outputs, [sent(source, rank) for source in range(ranks)])


@check("all_to_all_single")
def all_to_all_singles(rank: int, ranks: int) -> None:
    output = buffer((ranks, 5))
    distributed.all_to_all_single(output, of_rank(rank, (ranks, 5)))
    same(output, torch.stack([of_rank(r, (ranks, 5))[rank] for r in range(ranks)]))
    rows = [1 + r for r in range(ranks)]  # that every rank sends to rank r
    plain = plain_buffer((ranks * rows[rank], 5))
    sent = [torch.split(of_rank(r, (sum(rows), 5)), rows)[rank] for r in range(ranks)]
    distributed.all_to_all_single(plain, of_rank(rank, (sum(rows), 5)), [rows[rank]] * ranks, rows)
    same(plain, updated(torch.cat(sent)))


@check("send and recv")
def sends(rank: int, ranks: int) -> None:
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    if rank % 2 == 0:
        distributed.send(of_rank(rank), right, tag=3)
    output = buffer()
    distributed.recv(output, left, tag=3)
    if rank % 2:
        distributed.send(of_rank(rank), right, tag=3)
    same(output, of_rank(left))


@check("isend and irecv")
def isends(rank: int, ranks: int) -> None:
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    outputs = [buffer() for _ in range(2)]
    works = [distributed.isend(of_rank(rank, seed=seed), right) for seed in range(2)]
    works += [distributed.irecv(output, left) for output in outputs]
    for work in works:
        assert work is not None
        work.wait()
    all_same(outputs, [of_rank(left, seed=seed) for seed in range(2)])


@check("batch_isend_irecv")
def batches(rank: int, ranks: int) -> None:
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    output, other = buffer(), buffer()
    operations = [
        distributed.P2POp(distributed.isend, of_rank(rank), right),
        distributed.P2POp(distributed.irecv, output, left),
        distributed.P2POp(distributed.isend, of_rank(rank, seed=1), left, tag=1),
        distributed.P2POp(distributed.irecv, other, right, tag=1),
    ]
    for work in distributed.batch_isend_irecv(operations):
        work.wait()
    same(output, of_rank(left))
    same(other, of_rank(right, seed=1))


@check("all_gather_coalesced")
def coalesced_gathers(rank: int, ranks: int) -> None:
    outputs = [[buffer() for _ in range(2)] for _ in range(ranks)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        distributed.all_gather_coalesced(outputs, [of_rank(rank, seed=seed) for seed in range(2)])
    for r in range(ranks):
        all_same(outputs[r], [of_rank(r, seed=seed) for seed in range(2)])


@check("objects")
def objects(rank: int, ranks: int) -> None:
    gathered: Any = [None] * ranks if rank == 0 else None
    distributed.gather_object(of_rank(rank), gathered)
    if rank == 0:
        all_same(gathered, of_all(ranks))
    scattered: list[Any] = [None]
    distributed.scatter_object_list(scattered, of_all(ranks))
    same(scattered[0], of_rank(rank))
    if rank == 0:
        distributed.send_object_list([of_rank(0)], 1)
    elif rank == 1:
        distributed.recv_object_list(scattered, 0)
        same(scattered[0], of_rank(0))
    found: list[Any] = [None] * ranks
    distributed.all_gather_object(found, of_rank(rank))
    all_same(found, of_all(ranks))
    one: list[Any] = [of_rank(rank)]
    distributed.broadcast_object_list(one, 1)
    same(one[0], of_rank(1))
