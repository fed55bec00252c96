"""What an asynchronous collective of masked tensors returns: a Work, and its future."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from torch import distributed

import masked_dispatch as md
from masked_collectives import of_rank, same
from process_groups import Check
from storages import storages_but


def waited_for(rank: int, ranks: int) -> None:
    storages = storages_but("permuted").values()
    tensors: list[Any] = [stored(of_rank(rank, (4, 6), seed=seed)) for seed, stored in enumerate(storages)]
    works = [distributed.all_reduce(t, async_op=True) for t in tensors]
    for work in reversed(works):
        assert work is not None
        assert work.wait()
        assert work.wait()
        assert work.is_completed()
    for seed, t in enumerate(tensors):
        same(t.to_dense(), md.accumulate(*[of_rank(r, (4, 6), seed=seed) for r in range(ranks)]))


def future(rank: int, ranks: int) -> None:
    tensors = [of_rank(rank, seed=seed) for seed in range(2)]
    works = [distributed.all_reduce(t, async_op=True) for t in tensors]
    seen: list[bool] = []
    for work in works:
        assert work is not None
        assert not work.is_completed()
        work.get_future().then(lambda f: seen.append(f.done())).wait()
        assert work.get_future().done()
        assert work.is_completed()
    assert seen == [True, True]
    for seed, t in enumerate(tensors):
        same(t, md.accumulate(*[of_rank(r, seed=seed) for r in range(ranks)]))


def freed(rank: int, ranks: int) -> None:
    work: Any = distributed.all_reduce(of_rank(rank), async_op=True)
    there = weakref.ref(work)
    work.wait()
    del work
    gc.collect()
    assert there() is None


CHECKS: dict[str, Check] = {
    "asynchronous: waited for twice and out of order": waited_for,
    "asynchronous: the future of a Work, which nobody has waited for": future,
    "asynchronous: a Work is gone when it was waited for": freed,
}
