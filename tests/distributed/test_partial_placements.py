"""A masked tensor is never Partial: a mask has no partial sums. Every door of distributed tensors refuses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

import masked_dispatch as md
from masked_dispatch.assumptions.distributed import one_rank

X = md.masked_tensor(torch.ones(4), torch.tensor([True, True, False, True]))
DOORS: dict[str, Callable[[md.MaskedTensor, DeviceMesh, list[Placement]], Any]] = {
    "distribute": md.distributed.distribute,
    "from_local": md.distributed.from_local,
    "redistribute": lambda x, mesh, p: md.distributed.redistribute(
        md.distributed.distribute(x, mesh, [Replicate()]), mesh, p
    ),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("reduce", ["sum", "avg", "max", "product"])
def test_partial_is_refused_and_the_way_out_named(reduce: str, door: str) -> None:
    expected = (
        rf"distributed\.{door} of a tensor of shape \(4,\) with Partial\(.*\) along dimension 0 of the mesh: a mask "
    )
    with (
        one_rank(),
        pytest.raises(md.MaskedSemanticsError, match=f"{expected}has no partial sums. First combine .*all_reduce"),
    ):
        DOORS[door](X, init_device_mesh("cpu", (1,)), [Partial(reduce)])


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("placement", [Replicate(), Shard(0)])
def test_other_placements_keep_values_and_mask(placement: Placement, door: str) -> None:
    with one_rank():
        placed = DOORS[door](X, init_device_mesh("cpu", (1,)), [placement])
        assert md.distributed.full_tensor(placed).get_mask().tolist() == X.get_mask().tolist()
        assert md.distributed.full_tensor(placed).count() == 3
