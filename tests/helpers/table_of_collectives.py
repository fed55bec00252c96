"""Every function of torch.distributed that takes tensors, in four storages, called in each way that it can be called.

eager       waited for by the function
async       `async_op=True`, waited for by the caller; isend and irecv
functional  the functional collective of the same meaning, where torch has one
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed
from torch.distributed import _functional_collectives as functional
from torch.distributed import group as groups

import masked_dispatch as md
from masked_collectives import of_rank, same
from process_groups import Check
from storages import STORAGES

CHECKS: dict[str, Check] = {}
STORED = {**{name: STORAGES[name] for name in ("dense", "coo", "csr", "packed")}, "padded": lambda x: padded(x)}
ROWS, SHAPE = 4, (4, 6)

Stored = Callable[[Any], Any]
# What is called with, what it writes to or returns, and what that is then.
Case = tuple[tuple[Any, ...], Any, Sequence[Any]]


def padded(x: Any) -> Any:
    """The tensor as samples in rows, each as long as its last valid element says."""
    return md.padded(x, x.get_mask().flip(1).cumsum(1).flip(1) > 0, dim=1)


def same_stored(found: Any, expected: Any, storage: str) -> None:
    same(found.to_dense(), padded(expected) if storage == "padded" else expected)


def total(ranks: int, seed: int = 0, shape: Sequence[int] = SHAPE) -> Any:
    return md.accumulate(*[of_rank(r, shape, seed=seed) for r in range(ranks)])


def several(stored: Stored, ranks: int) -> list[Any]:
    """To be written to."""
    return [stored(of_rank(90 + r, SHAPE)) for r in range(ranks)]


def all_of(ranks: int) -> list[Any]:
    return [of_rank(r, SHAPE) for r in range(ranks)]


def all_reduce(stored: Stored, rank: int, ranks: int) -> Case:
    x = stored(of_rank(rank, SHAPE))
    return (x,), [x], [total(ranks)]


def all_reduce_coalesced(stored: Stored, rank: int, ranks: int) -> Case:
    tensors = [stored(of_rank(rank, SHAPE, seed=seed)) for seed in range(2)]
    return (tensors,), tensors, [total(ranks, seed) for seed in range(2)]


def reduce(stored: Stored, rank: int, ranks: int) -> Case:
    x = stored(of_rank(rank, SHAPE))
    return (x, 1), [x], [total(ranks) if rank == 1 else of_rank(rank, SHAPE)]


def reduce_scatter(stored: Stored, rank: int, ranks: int) -> Case:
    (output,) = several(stored, 1)
    parts = [stored(of_rank(rank, SHAPE, seed=seed)) for seed in range(ranks)]
    return (output, parts), [output], [total(ranks, seed=rank)]


def reduce_scatter_tensor(stored: Stored, rank: int, ranks: int) -> Case:
    (output,), whole = several(stored, 1), (ROWS * ranks, SHAPE[1])
    expected = total(ranks, shape=whole).split(ROWS)[rank]
    return (output, stored(of_rank(rank, whole))), [output], [expected]


def broadcast(stored: Stored, rank: int, ranks: int) -> Case:
    x = stored(of_rank(rank, SHAPE))
    return (x, 1), [x], [of_rank(1, SHAPE)]


def all_gather(stored: Stored, rank: int, ranks: int) -> Case:
    outputs = several(stored, ranks)
    return (outputs, stored(of_rank(rank, SHAPE))), outputs, all_of(ranks)


def all_gather_coalesced(stored: Stored, rank: int, ranks: int) -> Case:
    outputs = several(stored, ranks)
    return ([[output] for output in outputs], [stored(of_rank(rank, SHAPE))]), outputs, all_of(ranks)


def all_gather_into_tensor(stored: Stored, rank: int, ranks: int) -> Case:
    output = stored(of_rank(90, (ROWS * ranks, SHAPE[1])))
    return (output, stored(of_rank(rank, SHAPE))), [output], [torch.cat(all_of(ranks))]


def gather(stored: Stored, rank: int, ranks: int) -> Case:
    outputs = several(stored, ranks) if rank == 1 else []
    return (stored(of_rank(rank, SHAPE)), outputs or None, 1), outputs, all_of(ranks) if rank == 1 else []


def gather_into_tensor(stored: Stored, rank: int, ranks: int) -> Case:
    output = stored(of_rank(90, (ROWS * ranks, SHAPE[1]))) if rank == 1 else None
    whole = [torch.cat(all_of(ranks))] if rank == 1 else []
    return (stored(of_rank(rank, SHAPE)), output, 1), [output] if rank == 1 else [], whole


def scatter(stored: Stored, rank: int, ranks: int) -> Case:
    (output,) = several(stored, 1)
    parts = [stored(of_rank(r, SHAPE)) for r in range(ranks)] if rank == 0 else None
    return (output, parts), [output], [of_rank(rank, SHAPE)]


def all_to_all(stored: Stored, rank: int, ranks: int) -> Case:
    outputs = several(stored, ranks)
    inputs = [stored(of_rank(rank, SHAPE, seed=seed)) for seed in range(ranks)]
    return (outputs, inputs), outputs, [of_rank(r, SHAPE, seed=rank) for r in range(ranks)]


def all_to_all_single(stored: Stored, rank: int, ranks: int) -> Case:
    whole = (ROWS * ranks, SHAPE[1])
    output = stored(of_rank(90, whole))
    arrived = torch.cat([of_rank(r, whole).split(ROWS)[rank] for r in range(ranks)])
    return (output, stored(of_rank(rank, whole))), [output], [arrived]


CASES: dict[str, Callable[[Stored, int, int], Case]] = {
    "all_gather": all_gather,
    "all_gather_coalesced": all_gather_coalesced,
    "all_gather_into_tensor": all_gather_into_tensor,
    "all_gather_single": all_gather_into_tensor,
    "all_reduce": all_reduce,
    "all_reduce_coalesced": all_reduce_coalesced,
    "all_to_all": all_to_all,
    "all_to_all_single": all_to_all_single,
    "broadcast": broadcast,
    "gather": gather,
    "gather_into_tensor": gather_into_tensor,
    "gather_single": gather_into_tensor,
    "reduce": reduce,
    "reduce_scatter": reduce_scatter,
    "reduce_scatter_single": reduce_scatter_tensor,
    "reduce_scatter_tensor": reduce_scatter_tensor,
    "scatter": scatter,
}

# The functional collective of the same meaning, given the last argument of the case, which is its input.
FUNCTIONAL: dict[str, Callable[[Any], Any]] = {
    "all_gather_into_tensor": lambda x: functional.all_gather_tensor(x, 0, groups.WORLD),
    "all_reduce": lambda x: functional.all_reduce(x, "sum", groups.WORLD),
    "all_reduce_coalesced": lambda x: functional.all_reduce_coalesced(x, "sum", groups.WORLD),
    "all_to_all_single": lambda x: functional.all_to_all_single(x, None, None, groups.WORLD),
    "broadcast": lambda x: functional.broadcast(x, 1, groups.WORLD),
    "reduce_scatter_tensor": lambda x: functional.reduce_scatter_tensor(x, "sum", 0, groups.WORLD),
}


def called(name: str, args: tuple[Any, ...], outputs: Any, way: str) -> Any:
    """Make the call; what it has written or returned."""
    if way == "functional":
        result = FUNCTIONAL[name](args[0] if name in ("broadcast", "all_reduce") else args[-1])
        return result if isinstance(result, list) else [result]
    work = getattr(distributed, name)(*args, async_op=way == "async")
    assert (work is None) == (way == "eager")
    if work is not None:
        getattr(work, "wait", lambda: work)()
    return outputs


def checked(rank: int, ranks: int, name: str, storage: str, way: str) -> None:
    args, outputs, expected = CASES[name](STORED[storage], rank, ranks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        found = called(name, args, outputs, way)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert type(one) is type(STORED[storage](of_rank(0, SHAPE)))
        same_stored(one, other, storage)


def ring(rank: int, ranks: int, storage: str, way: str) -> None:
    """send, recv, isend, irecv and batch_isend_irecv: each rank sends to the next."""
    stored, right, left = STORED[storage], (rank + 1) % ranks, (rank - 1) % ranks
    x, (output,) = stored(of_rank(rank, SHAPE)), several(stored, 1)
    if way == "eager":
        if rank % 2 == 0:
            distributed.send(x, right)
        distributed.recv(output, left)
        if rank % 2:
            distributed.send(x, right)
    else:
        sends = distributed.P2POp(distributed.isend, x, right)
        receives = distributed.P2POp(distributed.irecv, output, left)
        works = (
            distributed.batch_isend_irecv([sends, receives])
            if way == "batch"
            else [distributed.isend(x, right), distributed.irecv(output, left)]
        )
        for work in works:
            assert work is not None
            work.wait()
    same_stored(output, of_rank(left, SHAPE), storage)


def objects(rank: int, ranks: int, storage: str) -> None:
    """The functions of objects: a masked tensor is pickled."""
    x = STORED[storage](of_rank(rank, SHAPE))
    found: list[Any] = [None] * ranks
    distributed.all_gather_object(found, x)
    gathered: Any = [None] * ranks if rank == 1 else None
    distributed.gather_object(x, gathered, 1)
    sent, scattered, passed = [x], [None], [None]
    distributed.broadcast_object_list(sent, 1)
    distributed.scatter_object_list(scattered, found if rank == 0 else None)
    if rank == 0:
        distributed.send_object_list([x], 1)
    if rank == 1:
        distributed.recv_object_list(passed, 0)
    pairs = [*zip(found, range(ranks), strict=True), (sent[0], 1), (scattered[0], rank)]
    pairs += [*zip(gathered, range(ranks), strict=True), (passed[0], 0)] if rank == 1 else []
    for one, r in pairs:
        assert one.layout == x.layout
        same_stored(one, of_rank(r, SHAPE), storage)


def ways(name: str) -> list[str]:
    function = getattr(distributed, name, None)
    if function is None:  # not in every version that is supported
        return []
    with_work = "async_op" in inspect.signature(function).parameters
    return ["eager", *(["async"] if with_work else []), *(["functional"] if name in FUNCTIONAL else [])]


for storage in STORED:
    for name in CASES:
        for way in ways(name):
            CHECKS[f"{name}, {storage}, {way}"] = functools.partial(checked, name=name, storage=storage, way=way)
    for way in ("eager", "async", "batch"):
        CHECKS[f"send and recv, {storage}, {way}"] = functools.partial(ring, storage=storage, way=way)
    CHECKS[f"objects, {storage}"] = functools.partial(objects, storage=storage)
