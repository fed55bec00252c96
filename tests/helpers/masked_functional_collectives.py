"""torch's functional collectives on masked tensors: what table_of_collectives does not ask of them."""

from __future__ import annotations

import torch
from torch.distributed import _functional_collectives as functional
from torch.distributed import group as groups

import masked_dispatch as md
from masked_collectives import of_all, of_rank, same
from process_groups import Check
from table_of_collectives import deprecated


def along_each_dimension(rank: int, ranks: int) -> None:
    wide = (4, 4)
    with deprecated():
        for dim in (0, 1):
            gathered = functional.all_gather_tensor(of_rank(rank), dim, groups.WORLD)
            same(gathered, torch.cat(of_all(ranks), dim))
            part = functional.reduce_scatter_tensor(of_rank(rank, wide), "avg", dim, groups.WORLD)
            same(part, md.mean(torch.stack(of_all(ranks, wide)), 0).chunk(ranks, dim)[rank])


def in_place(rank: int, ranks: int) -> None:
    x = of_rank(rank)
    functional.all_reduce_inplace(x, "sum", groups.WORLD)
    same(x, md.accumulate(*of_all(ranks)))


def of_plain(rank: int, ranks: int) -> None:
    result = functional.all_reduce(torch.ones(3), "sum", groups.WORLD)
    assert type(result).__name__ == "AsyncCollectiveTensor"
    assert (result == ranks).all()


CHECKS: dict[str, Check] = {
    "functional all_gather and reduce_scatter along each dimension": along_each_dimension,
    "functional all_reduce in place": in_place,
    "functional: plain tensors keep torch's asynchronous wrapper": of_plain,
}
