"""What table_of_collectives does not ask of collectives of sparsely stored tensors: patterns, bytes, refusals."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import torch
from torch import distributed
from torch.distributed import _functional_collectives as functional
from torch.distributed import group as groups
from torch.nn.parallel import DistributedDataParallel

import masked_dispatch as md
from cost_of_collectives import gathered_messages
from masked_collectives import expected_of, of_rank, same
from masked_dispatch.distributed import calls
from op_registry import MaskedSemanticsError
from process_groups import Checks
from refused_collectives import raises, still_works
from table_of_collectives import deprecated

CHECKS = Checks("sparse: ")


def alike(actual: Any, expected: Any, stored: Any) -> None:
    assert actual.storage_layout == stored.storage_layout
    same(actual.to_dense(), expected)


@CHECKS.named("the derivative of an average sends what that of a sum sends")
def messages_in_backward(rank: int, ranks: int) -> None:
    for call in (
        lambda x, op: functional.all_reduce(x, op, groups.WORLD),
        lambda x, op: functional.reduce_scatter_tensor(x, op, 0, groups.WORLD),
    ):
        sent = {}
        for op in ("sum", "avg"):
            x = of_rank(rank, (4 * ranks, 6)).to_sparse().requires_grad_()
            with deprecated():
                loss = call(x, op).to_dense().sum()
            with mock.patch.object(calls, "agree", wraps=calls.agree) as agreed:
                loss.backward()
            sent[op] = agreed.call_count
        assert sent["sum"] == sent["avg"] == 1


@CHECKS.named("reductions without derivatives say so in backward")
def without_derivatives(rank: int, ranks: int) -> None:
    x = of_rank(rank).to_sparse().requires_grad_()
    result = functional.all_reduce(x, "max", groups.WORLD).to_dense().sum()
    raises(RuntimeError, result.backward, "MAX of sparsely stored tensors has no derivative across ranks")


@CHECKS.named("dense dimensions, invalid elements among what is stored, nothing stored, everything")
def patterns(rank: int, ranks: int) -> None:
    def of(r: int) -> Any:
        return of_rank(r, (5, 3, 2)).to_sparse(sparse_dim=2)

    x = of(rank)
    distributed.all_reduce(x)
    alike(x, expected_of("SUM", [of(r).to_dense() for r in range(ranks)]), of(rank))
    for share in (0.0, 1.0):
        tensors = [md.as_masked_tensor(torch.full((3, 4), r + 1.0), torch.rand(3, 4) < share) for r in range(ranks)]
        y = tensors[rank].to_sparse_csr()
        distributed.all_reduce(y)
        alike(y, md.accumulate(*tensors), tensors[rank].to_sparse_csr())


@CHECKS.named("of 32-bit indices stays of 32-bit indices")
def index_dtype(rank: int, ranks: int) -> None:
    crow, col = torch.tensor([0, 1, 1], dtype=torch.int32), torch.tensor([rank], dtype=torch.int32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # CSR is in beta state
        plain = torch.sparse_csr_tensor(crow, col, torch.ones(1), (2, 9), check_invariants=True)
    x: Any = md.masked_tensor(plain)
    distributed.all_reduce(x)
    assert x.to_torch_sparse().crow_indices().dtype is torch.int32
    assert x.nnz == ranks


@CHECKS.named("1 % valid costs 5 % of the bytes")
def bytes_on_the_wire(rank: int, ranks: int) -> None:
    n, generator = 512, torch.Generator().manual_seed(rank)
    x: Any = md.masked_tensor(torch.randn(n, n), torch.rand(n, n, generator=generator) < 0.01).to_sparse()
    with gathered_messages() as sent:
        distributed.all_reduce(x)
    assert 0 < sum(sent) <= 0.05 * 4 * n * n


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


@CHECKS.named("topk_hook: all of the gradients is what DistributedDataParallel sends, and a tenth trains as well")
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


@CHECKS.named("refused on every rank")
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
    blocks = of_rank(rank, (4, 6)).to_sparse_bsr((2, 2) if rank else (4, 6))
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
    still_works(rank, ranks)
