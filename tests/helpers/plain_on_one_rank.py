"""Collectives that one rank calls with plain tensors alone: the others raise within the time limit of the group.

The rank with plain tensors has torch's own call, which waits for the others, or does not. No process may end: gloo ends
one whose collective receives more bytes than it expects, so there are tensors smaller and larger than a description.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time

from torch import distributed
from torch.utils._pytree import tree_map

import masked_dispatch as md
from process_groups import Check, impatient_group
from refused_collectives import raises, still_works
from table_of_collectives import CASES, DISTINCT, Kind, Trial, called, deprecated, ways

CHECKS: dict[str, Check] = {}
KINDS = {
    "few": Kind(shape=(4, 1)),
    "many": Kind(shape=(4, 1024)),
    "few into plain": Kind(shape=(4, 2), plain="received"),
}
ROOTED = ("broadcast", "gather", "gather_into_tensor", "reduce", "scatter")


def check(rank: int, ranks: int, name: str, kind: Kind, root: int, way: str) -> None:
    trial, group = Trial(rank, ranks, kind, root=root), impatient_group()
    args, outputs, _ = CASES[name](trial)
    started = time.monotonic()
    with deprecated():
        if rank == 0:
            args, outputs = tree_map(lambda x: x.get_data() if isinstance(x, md.MaskedTensor) else x, (args, outputs))
            with contextlib.suppress(RuntimeError):
                found = called(name, trial, args, outputs, way, group)
                assert not any(isinstance(x, md.MaskedTensor) for x in found)
        else:
            raises(
                RuntimeError,
                lambda: called(name, trial, args, outputs, way, group),
                "the other ranks did not describe their tensors in time",
                "masked_dispatch.as_masked_tensor(x)",
            )
    assert time.monotonic() - started < 10
    distributed.barrier()
    still_works(rank, ranks)


for (of, kind), name, root, way in itertools.product(KINDS.items(), DISTINCT, (0, 1), ("eager", "functional")):
    if way in ways(name, Kind()) and (root or name in ROOTED) and (kind.plain == "nothing" or name == "all_gather"):
        CHECKS[f"{name}, {of}, root {root}, {way}"] = functools.partial(check, name=name, kind=kind, root=root, way=way)
