"""Every function of torch.distributed that takes tensors, in each storage, with each kind of extent, and in each way of
calling it.

eager       waited for by the function
async       `async_op=True`, waited for by the caller; isend and irecv
functional  the functional collective of the same meaning, where torch has one
writing     the functional operator that writes to its argument, where torch has one
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed import _functional_collectives as functional
from torch.distributed import group as groups

import masked_dispatch as md
from masked_collectives import of_rank
from op_registry import MaskedSemanticsError
from op_registry.extents.factors import factors_of
from op_registry.extents.found import contradiction
from process_groups import Check
from storages import STORAGES

CHECKS: dict[str, Check] = {}
ROWS, SHAPE = 4, (4, 3, 2)


def of_samples(rank: int, shape: Sequence[int], seed: int, form: str) -> Any:
    """Samples in rows, and their steps; which of them are there, differs from rank to rank."""
    x = of_rank(rank, shape, seed=seed)
    mask = x.get_mask()
    if form == "scattered":  # on no rank, samples lie together by chance
        mask[1] = torch.tensor([[True, True], [False, False], [True, False]])
        return md.as_masked_tensor(torch.nan_to_num(x.get_data()), mask).to_packed().to_dense()
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    lengths = torch.randint(0, 4, (shape[0], 1, 1), generator=generator)
    lengths[1] = 1  # on no rank, all samples are as long by chance
    there = (torch.arange(3).view(3, 1) < lengths).expand(*shape)
    if form == "factors":
        there = there & (torch.arange(2) < torch.randint(0, 3, (shape[0], 1, 1), generator=generator))
    if form == "front" or (form == "either" and rank % 2):
        there = there.flip(1)
    if form != "mask":
        return md.padded(x.mask_with(there), there, dim=(1, 2) if form == "factors" else 1)
    # The extent is the mask, one object for all batches.
    return md.from_lengths(torch.nan_to_num(x.get_data()), lengths.flatten())


class Kind:
    """How tensors are made: with which extent, and in which storage."""

    def __init__(self, form: str | None, stored: Callable[[Any], Any]) -> None:
        self.form, self.stored = form, stored

    def dense(self, rank: int, shape: Sequence[int] = SHAPE, seed: int = 0) -> Any:
        return of_rank(rank, shape, seed=seed) if self.form is None else of_samples(rank, shape, seed, self.form)

    def __call__(self, rank: int, shape: Sequence[int] = SHAPE, seed: int = 0) -> Any:
        return self.stored(self.dense(rank, shape, seed))

    def total(self, ranks: int, seed: int = 0, shape: Sequence[int] = SHAPE) -> Any:
        """The sum over ranks in one process, or the error that it raises, and all ranks have to raise, too."""
        try:
            return md.accumulate(*[self.dense(r, shape, seed) for r in range(ranks)])
        except MaskedSemanticsError as refused:
            return refused

    def several(self, ranks: int) -> list[Any]:
        """To be written to."""
        return [self(90 + r) for r in range(ranks)]

    def all_of(self, ranks: int) -> list[Any]:
        return [self.dense(r) for r in range(ranks)]


STORED: dict[str, Callable[[Any], Any]] = {
    "dense": lambda x: x,
    "coo": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_layout(torch.sparse_csr, sparse_dim=2),
    "packed": lambda x: x.to_packed(),
}
FORMS = ("mask", "missing", "front", "either", "scattered", "factors")
KINDS = {
    **{storage: Kind(None, stored) for storage, stored in STORED.items()},
    "packed": Kind(None, STORAGES["packed"]),  # without an extent
    **{f"{storage} {form}": Kind(form, stored) for storage, stored in STORED.items() for form in FORMS},
}

# What is called with, what it writes to or returns, and what that is then.
Case = tuple[tuple[Any, ...], Any, Sequence[Any]]


def same_stored(found: Any, expected: Any) -> None:
    """The same values, mask and extent; what is known of this is true."""
    found = found.to_dense()
    md.testing.assert_close(found, expected, rtol=0, atol=0, check_extent=True)
    assert not any(contradiction(f.along, f.there) for f in factors_of(found._printed_record))


def rows_of(whole: Any, rank: int) -> Any:
    return whole if isinstance(whole, Exception) else whole.split(ROWS)[rank]


def all_reduce(kind: Kind, rank: int, ranks: int) -> Case:
    x = kind(rank)
    return (x,), [x], [kind.total(ranks)]


def all_reduce_coalesced(kind: Kind, rank: int, ranks: int) -> Case:
    tensors = [kind(rank, seed=seed) for seed in range(2)]
    return (tensors,), tensors, [kind.total(ranks, seed) for seed in range(2)]


def reduce(kind: Kind, rank: int, ranks: int) -> Case:
    x, total = kind(rank), kind.total(ranks)
    return (x, 1), [x], [total if rank == 1 or isinstance(total, Exception) else kind.dense(rank)]


def reduce_scatter(kind: Kind, rank: int, ranks: int) -> Case:
    (output,) = kind.several(1)
    parts = [kind(rank, seed=seed) for seed in range(ranks)]
    return (output, parts), [output], [kind.total(ranks, seed=rank)]


def reduce_scatter_tensor(kind: Kind, rank: int, ranks: int) -> Case:
    (output,), whole = kind.several(1), (ROWS * ranks, *SHAPE[1:])
    expected = rows_of(kind.total(ranks, shape=whole), rank)
    return (output, kind(rank, whole)), [output], [expected]


def broadcast(kind: Kind, rank: int, ranks: int) -> Case:
    x = kind(rank)
    return (x, 1), [x], [kind.dense(1)]


def all_gather(kind: Kind, rank: int, ranks: int) -> Case:
    outputs = kind.several(ranks)
    return (outputs, kind(rank)), outputs, kind.all_of(ranks)


def all_gather_coalesced(kind: Kind, rank: int, ranks: int) -> Case:
    outputs = kind.several(ranks)
    return ([[output] for output in outputs], [kind(rank)]), outputs, kind.all_of(ranks)


def all_gather_into_tensor(kind: Kind, rank: int, ranks: int) -> Case:
    output = kind(90, (ROWS * ranks, *SHAPE[1:]))
    return (output, kind(rank)), [output], [torch.cat(kind.all_of(ranks))]


def gather(kind: Kind, rank: int, ranks: int) -> Case:
    outputs = kind.several(ranks) if rank == 1 else []
    return (kind(rank), outputs or None, 1), outputs, kind.all_of(ranks) if rank == 1 else []


def gather_into_tensor(kind: Kind, rank: int, ranks: int) -> Case:
    output = kind(90, (ROWS * ranks, *SHAPE[1:])) if rank == 1 else None
    whole = [torch.cat(kind.all_of(ranks))] if rank == 1 else []
    return (kind(rank), output, 1), [output] if rank == 1 else [], whole


def scatter(kind: Kind, rank: int, ranks: int) -> Case:
    (output,) = kind.several(1)
    parts = [kind(0, seed=seed) for seed in range(ranks)] if rank == 0 else None
    return (output, parts), [output], [kind.dense(0, seed=rank)]


def all_to_all(kind: Kind, rank: int, ranks: int) -> Case:
    outputs = kind.several(ranks)
    inputs = [kind(rank, seed=seed) for seed in range(ranks)]
    return (outputs, inputs), outputs, [kind.dense(r, seed=rank) for r in range(ranks)]


def all_to_all_single(kind: Kind, rank: int, ranks: int) -> Case:
    whole = (ROWS * ranks, *SHAPE[1:])
    output = kind(90, whole)
    arrived = torch.cat([kind.dense(r, whole).split(ROWS)[rank] for r in range(ranks)])
    return (output, kind(rank, whole)), [output], [arrived]


CASES: dict[str, Callable[[Kind, int, int], Case]] = {
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


# The operators that write to the first argument of the case.
WRITING: dict[str, Callable[..., Any]] = {
    "all_gather_into_tensor": lambda out, x: OPERATORS.all_gather_into_tensor_out(x, *world(), out=out),
    "all_reduce": lambda x: OPERATORS.all_reduce_(x, "sum", world()[1]),
    "broadcast": lambda x, root: OPERATORS.broadcast_(x, root, world()[1]),
    "reduce_scatter_tensor": lambda out, x: OPERATORS.reduce_scatter_tensor_out(x, "sum", *world(), out=out),
}
OPERATORS: Any = torch.ops._c10d_functional


def world() -> tuple[int, Any]:
    return distributed.get_world_size(), groups.WORLD.group_name


def called(name: str, args: tuple[Any, ...], outputs: Any, way: str) -> Any:
    """Make the call; what it has written or returned."""
    if way == "functional":
        result = FUNCTIONAL[name](args[0] if name in ("broadcast", "all_reduce") else args[-1])
        return result if isinstance(result, list) else [result]
    if way == "writing":
        WRITING[name](*args)
        return outputs
    work = getattr(distributed, name)(*args, async_op=way == "async")
    assert (work is None) == (way == "eager")
    if work is not None:
        getattr(work, "wait", lambda: work)()
    return outputs


def checked(rank: int, ranks: int, name: str, kind: Kind, way: str) -> None:
    args, outputs, expected = CASES[name](kind, rank, ranks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        if any(isinstance(other, Exception) for other in expected):
            with pytest.raises((MaskedSemanticsError, ValueError), match=r"positions of their|their positions"):
                called(name, args, outputs, way)
            return
        views = [output[1] for output in outputs if type(output) is md.MaskedTensor]
        found = called(name, args, outputs, way)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert type(one) is type(kind(0))
        same_stored(one, other)
    if way != "functional":
        check_views(views, found, expected)


def check_views(views: Sequence[Any], bases: Sequence[Any], expected: Sequence[Any]) -> None:
    """Views of what is written to show what has arrived, and their bases what is then written to them."""
    for view, base, other in zip(views, bases, expected, strict=bool(views)):
        same_stored(view, other[1])
        view.fill_(5.0)
        other[1].fill_(5.0)
        same_stored(base, other)


def ring(rank: int, ranks: int, kind: Kind, way: str) -> None:
    """send, recv, isend, irecv and batch_isend_irecv: each rank sends to the next."""
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    x, (output,) = kind(rank), kind.several(1)
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
    same_stored(output, kind.dense(left))


def objects(rank: int, ranks: int, kind: Kind) -> None:
    """The functions of objects: a masked tensor is pickled."""
    x = kind(rank)
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
        same_stored(one, kind.dense(r))


def ways(name: str) -> list[str]:
    function = getattr(distributed, name, None)
    if function is None:  # not in every version that is supported
        return []
    with_work = "async_op" in inspect.signature(function).parameters
    functional_ways = [way for way, table in (("functional", FUNCTIONAL), ("writing", WRITING)) if name in table]
    return ["eager", *(["async"] if with_work else []), *functional_ways]


for of, kind in KINDS.items():
    for name in CASES:
        for way in ways(name):
            CHECKS[f"{name}, {of}, {way}"] = functools.partial(checked, name=name, kind=kind, way=way)
    for way in ("eager", "async", "batch"):
        CHECKS[f"send and recv, {of}, {way}"] = functools.partial(ring, kind=kind, way=way)
    CHECKS[f"objects, {of}"] = functools.partial(objects, kind=kind)
