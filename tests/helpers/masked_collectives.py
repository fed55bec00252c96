"""Masked tensors of ranks, what one process computes of all of them, and what collectives do to dense memory.

Every rank can make the tensor of every other rank. What is stored where a tensor is invalid is NaN, or as bad, and
differs between ranks. Each function of torch.distributed is asked in table_of_collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

import masked_dispatch as md
from masked_dispatch.testing import assert_close
from process_groups import Checks

SHAPE = (3, 5)
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
ALL_DTYPES = (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool)
REDUCTIONS: dict[str, Callable[[list[Any]], Any]] = {
    "SUM": lambda tensors: md.accumulate(*tensors),
    "AVG": lambda tensors: md.mean(torch.stack(tensors), 0),
    "MIN": lambda tensors: md.amin(torch.stack(tensors), 0),
    "MAX": lambda tensors: md.amax(torch.stack(tensors), 0),
    "PRODUCT": lambda tensors: md.prod(torch.stack(tensors), 0, dtype=tensors[0].dtype),
}

CHECKS = Checks()


def of_rank(rank: int, shape: Sequence[int] = SHAPE, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """The tensor of a rank: its first element is invalid on all ranks, its last valid on all."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    data = torch.randint(0, 9, tuple(shape), generator=generator).to(dtype)
    data = torch.complex(data.real, data.real + 1) if dtype.is_complex else data
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


def same(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected), (actual, expected)
    assert_close(actual, expected, rtol=0, atol=0)
    if isinstance(expected, md.MaskedTensor):
        assert known_of(actual) == known_of(expected)


def known_of(x: Any) -> Any:
    """What is known of the extent, and where it is; None without one."""
    return None if x.extent is None else (x._extent.known, x.extent.tolist())


def expected_of(op: str, tensors: Sequence[Any]) -> Any:
    """The reduction in one process; half precision in float32, rounded once."""
    dtype = tensors[0].dtype
    if dtype is torch.bool:
        tensors = [t.to(torch.uint8) for t in tensors]
        op = {"SUM": "MAX", "PRODUCT": "MIN"}.get(op, op)
    if dtype in (torch.float16, torch.bfloat16):
        tensors = [t.float() for t in tensors]
    return REDUCTIONS[op](list(tensors)).to(dtype)


def reduction(op: str) -> Any:
    return getattr(distributed.ReduceOp, op)


# ------------------------------------------------------------------------------------------------------ dense memory


@CHECKS.named("all_reduce: views, strides, sizes 0 and 1")
def shapes(rank: int, ranks: int) -> None:
    for dtype in (torch.float64, torch.complex64):
        base, expected = (of_rank(rank, (4, 6), dtype) for _ in range(2))
        distributed.all_reduce(base.t()[1:3])
        expected[:, 1:3] = expected_of("SUM", [t[:, 1:3] for t in of_all(ranks, (4, 6), dtype)])
        same(base, expected)
    for shape in [(), (0,), (1,), (7,), (2, 0, 3), (33,)]:
        x = md.as_masked_tensor(torch.zeros(0).view(shape)) if 0 in shape else of_rank(rank, shape)
        distributed.all_reduce(x)
        if 0 not in shape:
            same(x, expected_of("SUM", of_all(ranks, shape)))


@CHECKS.named("all_reduce: in the memory of a large tensor, seen by its base and its copies not")
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


@CHECKS.named("all_reduce: a parameter that requires grad stays a leaf")
def parameter(rank: int, ranks: int) -> None:
    x = torch.nn.Parameter(of_rank(rank))
    distributed.all_reduce(x.data)
    distributed.all_reduce(x)
    assert x.is_leaf
    assert x.requires_grad


@CHECKS.named("all_reduce: a group of some ranks")
def subgroup(rank: int, ranks: int) -> None:
    group = distributed.new_group([1])
    x = of_rank(rank)
    if rank == 1:
        distributed.all_reduce(x, group=group)
    same(x, of_rank(rank))
