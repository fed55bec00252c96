"""Collectives that one rank calls with plain tensors alone: the others raise within the time limit of the group.

The rank with plain tensors has torch's own call, which waits for the others, or does not. No process may end: gloo ends
one whose collective receives more bytes than it expects, so there are tensors smaller and larger than a description.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import _functional_collectives as functional

import masked_dispatch as md
from process_groups import Check, impatient_group
from refused_collectives import raises, still_works

# Called with a tensor, with a list of one for each rank, and with the group.
CALLS: dict[str, Callable[[Tensor, list[Tensor], Any], Any]] = {
    "all_reduce": lambda x, parts, group: distributed.all_reduce(x, group=group),
    "reduce": lambda x, parts, group: distributed.reduce(x, 1, group=group),
    "broadcast from the plain rank": lambda x, parts, group: distributed.broadcast(x, 0, group=group),
    "broadcast from a masked rank": lambda x, parts, group: distributed.broadcast(x, 1, group=group),
    "all_gather": lambda x, parts, group: distributed.all_gather(parts, x, group=group),
    "all_gather, into plain tensors": lambda x, parts, group: distributed.all_gather(
        [torch.zeros(x.shape) for _ in parts], x, group=group
    ),
    "all_gather_into_tensor": lambda x, parts, group: distributed.all_gather_into_tensor(
        torch.cat(parts), x, group=group
    ),
    "gather": lambda x, parts, group: distributed.gather(
        x, parts if distributed.get_rank() == 1 else None, 1, group=group
    ),
    "scatter": lambda x, parts, group: distributed.scatter(
        x, parts if distributed.get_rank() == 1 else None, 1, group=group
    ),
    "reduce_scatter": lambda x, parts, group: distributed.reduce_scatter(x, parts, group=group),
    "reduce_scatter_tensor": lambda x, parts, group: distributed.reduce_scatter_tensor(
        x, torch.cat(parts), group=group
    ),
    "all_to_all": lambda x, parts, group: distributed.all_to_all([p.clone() for p in parts], parts, group=group),
    "all_to_all_single": lambda x, parts, group: distributed.all_to_all_single(
        torch.cat(parts), torch.cat(parts), group=group
    ),
    "functional all_reduce": lambda x, parts, group: functional.all_reduce(x, "sum", group),
    "functional broadcast": lambda x, parts, group: functional.broadcast(x, 1, group),
    "functional all_gather": lambda x, parts, group: functional.all_gather_tensor(x, 0, group),
    "functional reduce_scatter": lambda x, parts, group: functional.reduce_scatter_tensor(
        torch.cat(parts), "sum", 0, group
    ),
    "functional all_to_all": lambda x, parts, group: functional.all_to_all_single(torch.cat(parts), None, None, group),
}


def check(rank: int, ranks: int, call: Callable[[Tensor, list[Tensor], Any], Any], elements: int) -> None:
    group, x = impatient_group(), torch.ones(elements)
    masked: Any = md.masked_tensor(x, torch.arange(elements) % 2 == 0)
    warnings.simplefilter("ignore", FutureWarning)
    started = time.monotonic()
    if rank == 0:
        with contextlib.suppress(RuntimeError):
            result = call(x, [x.clone() for _ in range(ranks)], group)
            assert not isinstance(result, md.MaskedTensor)
    else:
        parts: list[Tensor] = [masked.clone() for _ in range(ranks)]
        raises(RuntimeError, lambda: call(masked, parts, group), "did not describe their tensors in time")
    assert time.monotonic() - started < 10
    distributed.barrier()
    still_works(rank, ranks)


CHECKS: dict[str, Check] = {
    f"{name}, {elements} elements": functools.partial(check, call=call, elements=elements)
    for (name, call), elements in itertools.product(CALLS.items(), (2, 4096))
}
