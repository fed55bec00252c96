"""torch.distributed's functions on sparsely stored masked tensors, compared as in masked_collectives; their bytes."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import distributed
from torch.distributed import _functional_collectives as functional
from torch.distributed import group as groups
from torch.nn.parallel import DistributedDataParallel

import masked_dispatch as md
from masked_collectives import (
    ALL_DTYPES,
    FLOATS,
    REDUCTIONS,
    expected_of,
    newest,
    of_rank,
    plain_buffer,
    reduction,
    same,
)
from masked_dispatch.distributed import calls
from masked_functional_collectives import deprecated
from op_registry import MaskedSemanticsError
from process_groups import Check
from refused_collectives import raises
from storages import storages_but

CHECKS: dict[str, Check] = {}
SLOW: dict[str, Check] = {}
SHAPE = (4, 6)
SPARSE = storages_but("dense", "permuted")


def of_each_storage(name: str) -> Callable[[Callable[[int, int, str], None]], Callable[[int, int, str], None]]:
    def add(function: Callable[[int, int, str], None]) -> Callable[[int, int, str], None]:
        for storage in SPARSE:
            CHECKS[f"{storage}: {name}"] = functools.partial(function, storage=storage)
        return function

    return add


def check(name: str) -> Callable[[Check], Check]:
    def add(function: Check) -> Check:
        CHECKS[f"sparse: {name}"] = function
        return function

    return add


def stored(storage: str, rank: int, shape: Sequence[int] = SHAPE, **options: Any) -> Any:
    return SPARSE[storage](of_rank(rank, shape, **options))


def of_all(storage: str, ranks: int, shape: Sequence[int] = SHAPE, **options: Any) -> list[Any]:
    return [stored(storage, rank, shape, **options) for rank in range(ranks)]


def buffer(storage: str, shape: Sequence[int] = SHAPE) -> Any:
    """To be written to; another pattern than any that arrives."""
    return stored(storage, 99, shape)


def alike(actual: Any, expected: Any, like: Any = None) -> None:
    """The same elements; stored as `like` is, or as what is expected."""
    assert actual.storage_layout == (expected if like is None else like).storage_layout
    same(actual.to_dense(), expected.to_dense())


def all_alike(actual: Sequence[Any], expected: Sequence[Any]) -> None:
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        alike(one, other)


def in_one_process(storage: str, op: str, tensors: Sequence[Any]) -> Any:
    return SPARSE[storage](expected_of(op, [t.to_dense() for t in tensors]))


@of_each_storage("all_reduce")
def all_reduces(rank: int, ranks: int, storage: str) -> None:
    for op in REDUCTIONS:
        for dtype in FLOATS if op == "AVG" else ALL_DTYPES:
            x = stored(storage, rank, dtype=dtype)
            distributed.all_reduce(x, reduction(op))
            alike(x, in_one_process(storage, op, of_all(storage, ranks, dtype=dtype)))
    tensors = [stored(storage, rank, seed=seed) for seed in range(2)]
    works = [distributed.all_reduce(t, async_op=True) for t in tensors]
    for seed, work in reversed(list(enumerate(works))):
        assert work is not None
        assert work.wait()
        alike(tensors[seed], in_one_process(storage, "SUM", of_all(storage, ranks, seed=seed)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        tensors = [stored(storage, rank, seed=seed) for seed in range(2)]
        distributed.all_reduce_coalesced(tensors)
    all_alike(tensors, [in_one_process(storage, "SUM", of_all(storage, ranks, seed=seed)) for seed in range(2)])


@of_each_storage("reduce, reduce_scatter, reduce_scatter_tensor")
def reduces(rank: int, ranks: int, storage: str) -> None:
    x = stored(storage, rank)
    distributed.reduce(x, 1, reduction("MAX"))
    alike(x, in_one_process(storage, "MAX", of_all(storage, ranks)) if rank == 1 else stored(storage, rank))
    expected = in_one_process(storage, "SUM", [stored(storage, r, seed=rank) for r in range(ranks)])
    output = buffer(storage)
    distributed.reduce_scatter(output, [stored(storage, rank, seed=seed) for seed in range(ranks)])
    alike(output, expected)
    whole = (4 * ranks, 6)
    (call,) = newest("reduce_scatter_single", "reduce_scatter_tensor")
    output = buffer(storage)
    call(output, stored(storage, rank, whole))
    total = expected_of("SUM", [of_rank(r, whole) for r in range(ranks)])[4 * rank : 4 * rank + 4]
    alike(output, total, like=output)


@of_each_storage("broadcast, all_gather, all_gather_into_tensor, gather, scatter")
def movements(rank: int, ranks: int, storage: str) -> None:
    for dtype in (*ALL_DTYPES, torch.int16, torch.complex64):
        x = stored(storage, rank, dtype=dtype)
        distributed.broadcast(x, 1)
        alike(x, stored(storage, 1, dtype=dtype))
    outputs = [buffer(storage) for _ in range(ranks)]
    distributed.all_gather(outputs, stored(storage, rank))
    all_alike(outputs, of_all(storage, ranks))
    plain = [plain_buffer(SHAPE) for _ in range(ranks)]
    distributed.all_gather(plain, stored(storage, rank))
    for output, arrived in zip(plain, of_all(storage, ranks), strict=True):
        same(output, arrived.to_tensor(-9))
    (call,) = newest("all_gather_single", "all_gather_into_tensor")
    output = buffer(storage, (4 * ranks, 6))
    call(output, stored(storage, rank))
    alike(output, torch.cat([t.to_dense() for t in of_all(storage, ranks)]), like=output)
    outputs = [buffer(storage) for _ in range(ranks)]
    distributed.gather(stored(storage, rank), outputs if rank == 1 else None, 1)
    if rank == 1:
        all_alike(outputs, of_all(storage, ranks))
    output = buffer(storage)
    distributed.scatter(output, [stored(storage, r, seed=7) for r in range(ranks)] if rank == 0 else None)
    alike(output, stored(storage, rank, seed=7))


@of_each_storage("all_to_all, all_to_all_single, send, recv")
def exchanges(rank: int, ranks: int, storage: str) -> None:
    def sent(source: int, target: int) -> Any:
        return stored(storage, source, (4 + 2 * source, 2 + 2 * target), seed=target)

    outputs = [buffer(storage, (4 + 2 * source, 2 + 2 * rank)) for source in range(ranks)]
    distributed.all_to_all(outputs, [sent(rank, target) for target in range(ranks)])
    all_alike(outputs, [sent(source, rank) for source in range(ranks)])
    whole = (2 * ranks, 6)
    output = buffer(storage, whole)
    distributed.all_to_all_single(output, stored(storage, rank, whole))
    pieces = [of_rank(r, whole).split(2)[rank] for r in range(ranks)]
    alike(output, torch.cat(pieces), like=output)
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    x = buffer(storage)
    work = distributed.isend(stored(storage, rank), right)
    distributed.recv(x, left)
    assert work is not None
    work.wait()
    alike(x, stored(storage, left))


@of_each_storage("functional collectives")
def functional_collectives(rank: int, ranks: int, storage: str) -> None:
    x = stored(storage, rank)
    for op in REDUCTIONS:
        name = "avg" if op == "AVG" else op.lower()
        alike(functional.all_reduce(x, name, groups.WORLD), in_one_process(storage, op, of_all(storage, ranks)))
    alike(x, stored(storage, rank))
    with deprecated():
        gathered: Any = functional.all_gather_tensor(x, 0, groups.WORLD)
    same(gathered.to_dense(), torch.cat([t.to_dense() for t in of_all(storage, ranks)]))
    alike(functional.broadcast(x, 1, groups.WORLD), stored(storage, 1))
    whole = (4 * ranks, 6)
    with deprecated():
        scattered: Any = functional.reduce_scatter_tensor(stored(storage, rank, whole), "sum", 0, groups.WORLD)
    total = expected_of("SUM", [of_rank(r, whole) for r in range(ranks)])
    same(scattered.to_dense(), total[4 * rank : 4 * rank + 4])
    exchanged: Any = functional.all_to_all_single(stored(storage, rank, whole), None, None, groups.WORLD)
    same(exchanged.to_dense(), torch.cat([of_rank(r, whole).split(4)[rank] for r in range(ranks)]))


WHOLE: dict[str, tuple[Callable[[Any], Any], Callable[[list[Any]], list[Any]]]] = {
    "all_reduce": (
        lambda x: functional.all_reduce(x, "sum", groups.WORLD),
        lambda tensors: [md.accumulate(*tensors)] * len(tensors),
    ),
    "all_reduce AVG": (
        lambda x: functional.all_reduce(x, "avg", groups.WORLD),
        lambda tensors: [md.mean(torch.stack(tensors), 0)] * len(tensors),
    ),
    "broadcast": (
        lambda x: functional.broadcast(x, 1, groups.WORLD),
        lambda tensors: [tensors[1]] * len(tensors),
    ),
    "all_gather": (
        lambda x: functional.all_gather_tensor(x, 0, groups.WORLD),
        lambda tensors: [torch.cat(tensors)] * len(tensors),
    ),
    "reduce_scatter": (
        lambda x: functional.reduce_scatter_tensor(x, "sum", 0, groups.WORLD),
        lambda tensors: list(md.accumulate(*tensors).chunk(len(tensors))),
    ),
    "reduce_scatter AVG": (
        lambda x: functional.reduce_scatter_tensor(x, "avg", 0, groups.WORLD),
        lambda tensors: list(md.mean(torch.stack(tensors), 0).chunk(len(tensors))),
    ),
    "all_to_all_single": (
        lambda x: functional.all_to_all_single(x, None, None, groups.WORLD),
        lambda tensors: [torch.cat([t.chunk(len(tensors))[r] for t in tensors]) for r in range(len(tensors))],
    ),
}


def derivatives(rank: int, ranks: int, storage: str) -> None:
    """Those of the sum over ranks, when one process computes all of it on dense storage."""
    shape = (4 * ranks, 6)

    def loss(y: Any, r: int) -> Any:
        weights = torch.randn(y.numel(), generator=torch.Generator().manual_seed(r)).double()
        return (y.to_dense().reshape(-1) ** 2 * weights).sum()

    for name, (call, in_one) in WHOLE.items():
        x = stored(storage, rank, shape).requires_grad_()
        with deprecated():
            loss(call(x), rank).backward()
        alone = [of_rank(r, shape).requires_grad_() for r in range(ranks)]
        md.accumulate(*[loss(y, r) for r, y in enumerate(in_one(alone))]).backward()
        expected: Any = alone[rank].grad
        if expected is None:  # what this rank has goes nowhere
            expected = md.masked_tensor(torch.zeros(shape).double(), alone[rank].get_mask())
        assert x.grad is not None, name
        md.testing.assert_close(x.grad.to_dense(), expected, msg=lambda text, name=name: f"{name}: {text}")


for storage in SPARSE:
    table = CHECKS if storage == "coo" else SLOW
    table[f"{storage}: derivatives of functional collectives"] = functools.partial(derivatives, storage=storage)


@check("the derivative of an average sends what that of a sum sends")
def messages_in_backward(rank: int, ranks: int) -> None:
    for call in (
        lambda x, op: functional.all_reduce(x, op, groups.WORLD),
        lambda x, op: functional.reduce_scatter_tensor(x, op, 0, groups.WORLD),
    ):
        sent = {}
        for op in ("sum", "avg"):
            x = stored("coo", rank, (4 * ranks, 6)).requires_grad_()
            with deprecated():
                loss = call(x, op).to_dense().sum()
            with mock.patch.object(calls, "agree", wraps=calls.agree) as agreed:
                loss.backward()
            sent[op] = agreed.call_count
        assert sent["sum"] == sent["avg"] == 1


@check("reductions without derivatives say so in backward")
def without_derivatives(rank: int, ranks: int) -> None:
    x = stored("coo", rank).requires_grad_()
    result = functional.all_reduce(x, "max", groups.WORLD).to_dense().sum()
    raises(RuntimeError, result.backward, "MAX of sparsely stored tensors has no derivative across ranks")


@check("dense dimensions, invalid elements among what is stored, nothing stored, everything")
def patterns(rank: int, ranks: int) -> None:
    def of(r: int) -> Any:
        return of_rank(r, (5, 3, 2)).to_sparse(sparse_dim=2)

    x = of(rank)
    distributed.all_reduce(x)
    alike(x, expected_of("SUM", [of(r).to_dense() for r in range(ranks)]), like=x)
    for share in (0.0, 1.0):
        tensors = [md.as_masked_tensor(torch.full((3, 4), r + 1.0), torch.rand(3, 4) < share) for r in range(ranks)]
        y = tensors[rank].to_sparse_csr()
        distributed.all_reduce(y)
        alike(y, md.accumulate(*tensors).to_sparse_csr())


@check("complex numbers")
def complex_numbers(rank: int, ranks: int) -> None:
    tensors = [of_rank(r, SHAPE, dtype=torch.complex128) for r in range(ranks)]
    x = tensors[rank].to_sparse_csr()
    distributed.all_reduce(x)
    alike(x, md.accumulate(*tensors).to_sparse_csr())


@check("of 32-bit indices stays of 32-bit indices")
def index_dtype(rank: int, ranks: int) -> None:
    crow, col = torch.tensor([0, 1, 1], dtype=torch.int32), torch.tensor([rank], dtype=torch.int32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # CSR is in beta state
        plain = torch.sparse_csr_tensor(crow, col, torch.ones(1), (2, 9), check_invariants=True)
    x: Any = md.masked_tensor(plain)
    distributed.all_reduce(x)
    assert x.to_torch_sparse().crow_indices().dtype is torch.int32
    assert x.nnz == ranks


@check("1 % valid costs 5 % of the bytes")
def bytes_on_the_wire(rank: int, ranks: int) -> None:
    n, seen = 512, 0
    generator = torch.Generator().manual_seed(rank)
    x: Any = md.masked_tensor(torch.randn(n, n), torch.rand(n, n, generator=generator) < 0.01).to_sparse()
    gather = distributed.all_gather_single

    def counted(out: Any, data: Any, **options: Any) -> Any:
        nonlocal seen
        seen += data.numel() * data.element_size()
        return gather(out, data, **options)

    distributed.all_gather_single = counted
    try:
        distributed.all_reduce(x)
    finally:
        distributed.all_gather_single = gather
    assert 0 < seen <= 0.05 * 4 * n * n


def classifier() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3)).double()


def losses_of(model: Any, rank: int, steps: int) -> list[float]:
    generator = torch.Generator().manual_seed(1 + rank)
    x = torch.randn(64, 20, generator=generator, dtype=torch.float64)
    target = (x[:, :3] + 0.5 * x[:, 3:6]).argmax(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@check("topk_hook: all of the gradients is what DistributedDataParallel sends, and a tenth trains as well")
def compressed(rank: int, ranks: int) -> None:
    curves = {}
    for share in (None, 1.0, 0.1):
        model = DistributedDataParallel(classifier(), bucket_cap_mb=0.004)
        state = None if share is None else md.distributed.TopK(share)
        if state is not None:
            model.register_comm_hook(state, md.distributed.topk_hook)
        curves[share] = losses_of(model, rank, 60)
        if state is not None:
            assert 0.9 * share <= state.sent / state.elements <= 1.1 * share
        for parameter in model.parameters():
            of_first = parameter.detach().clone()
            distributed.broadcast(of_first, 0)
            assert torch.equal(of_first, parameter)
    torch.testing.assert_close(curves[1.0], curves[None], rtol=1e-10, atol=0)
    assert curves[0.1][-1] < 0.2 * curves[0.1][0]
    assert curves[0.1][-1] < 1.5 * curves[None][-1] + 0.02, (curves[0.1][-1], curves[None][-1])


@check("refused on every rank")
def refused(rank: int, ranks: int) -> None:
    x = of_rank(rank)
    different = x.to_sparse() if rank else x.to_sparse_csr()
    raises(
        ValueError, lambda: distributed.all_reduce(different), "stored as torch.sparse_csr; rank", "torch.sparse_coo"
    )
    mixed = of_rank(rank) if rank else x.to_sparse()
    raises(
        ValueError, lambda: distributed.all_reduce(mixed), "rank 0 has float64 of shape (3, 5), stored as torch.sparse"
    )
    blocks = of_rank(rank, SHAPE).to_sparse_bsr((2, 2) if rank else (4, 6))
    raises(ValueError, lambda: distributed.all_reduce(blocks), "in blocks of (4, 6)", "in blocks of (2, 2)")
    view = x.to_sparse(sparse_dim=1).t()
    raises(MaskedSemanticsError, lambda: distributed.all_reduce(view), "rank 0: a tensor of shape (5, 3) is a view")
    outputs = [of_rank(rank, (2, 2)).to_sparse() for _ in range(ranks)]
    raises(MaskedSemanticsError, lambda: distributed.all_gather(outputs, x.to_sparse()), "tensor 0 of the list has")
    parts = [of_rank(rank).to_sparse(), *[of_rank(rank) for _ in range(1, ranks)]]
    output = of_rank(rank).to_sparse()
    raises(
        MaskedSemanticsError, lambda: distributed.reduce_scatter(output, parts), "is stored densely, and another one"
    )
    y = stored("coo", rank)
    distributed.all_reduce(y)
    alike(y, in_one_process("coo", "SUM", of_all("coo", ranks)))
