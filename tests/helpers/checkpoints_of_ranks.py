"""Checkpoints of masked tensors, saved by some ranks and loaded by others."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import masked_dispatch as md
from masked_collectives import of_rank, same
from process_groups import Checks
from refused_collectives import raises
from storages import STORAGES

CHECKS = Checks("checkpoint: ")
SLOW = Checks("checkpoint: ")


DATA = torch.arange(24.0).view(4, 6)
MASK = torch.arange(24).view(4, 6) % 5 == 2
# Masked tensors in every storage, and a tensor of the same storage and other contents for each.
SAVED: dict[str, Any] = {
    **{name: stored(md.masked_tensor(DATA, MASK)) for name, stored in STORAGES.items()},
    "all valid": md.as_masked_tensor(DATA),
    "nothing valid": md.masked_tensor(DATA, torch.zeros(4, 6, dtype=torch.bool)),
    "a single number": md.masked_tensor(torch.tensor(2.0), torch.tensor(False)),
    "padded": md.padded(md.masked_tensor(DATA, MASK), torch.arange(6) < torch.tensor([[4], [2], [6], [5]])),
    "padded, packed": md.from_lengths(DATA, torch.tensor([6, 5, 1, 0])).to_packed(),
    "padded, coo": md.from_lengths(DATA, torch.tensor([6, 5, 1, 0])).to_sparse(),
    "only padded": md.from_lengths(DATA, torch.tensor([6, 5, 1, 0])),
    "bfloat16": md.masked_tensor(DATA.bfloat16(), MASK),
    "complex": md.masked_tensor(DATA.to(torch.complex64), MASK),
    "bool": md.masked_tensor(DATA > 5, MASK),
    "a view": md.masked_tensor(torch.arange(48.0).view(6, 8).t(), torch.arange(48).view(8, 6) % 3 > 0)[1:5],
}


def emptied(name: str) -> Any:
    """A tensor to load into: of the same dtype, shape and storage, and all valid zeros."""
    x = SAVED[name]
    stored = STORAGES.get(name.removeprefix("padded, "), lambda zeros: zeros)
    return stored(md.as_masked_tensor(torch.zeros(x.shape, dtype=x.dtype)))


@contextmanager
def folder(rank: int) -> Iterator[str]:
    """One folder for all ranks."""
    with tempfile.TemporaryDirectory() as own:
        name = [own]
        distributed.broadcast_object_list(name)
        yield name[0]
        distributed.barrier()


@functools.cache
def groups_of(ranks: int) -> dict[int, Any]:
    """Groups of the first 1, 2, … ranks."""
    return {size: distributed.new_group(list(range(size))) for size in (1, 2, 4) if size <= ranks}


def state(masked: Any) -> dict[str, Any]:
    return {"model": {"x": masked, "y": torch.ones(3)}, "list": [masked.clone(), torch.zeros(())], "step": 7}


@CHECKS.named("what every storage holds, saved and loaded by 1, 2 and 4")
def storages(rank: int, ranks: int) -> None:
    for savers, saving in groups_of(ranks).items():
        with folder(rank) as where:
            whole = {name: state(x) for name, x in SAVED.items()}
            if rank < savers:
                checkpoint.save(whole, checkpoint_id=where, process_group=saving)
            for loaders, loading in groups_of(ranks).items():
                distributed.barrier()
                if rank < loaders:
                    found = {name: state(emptied(name)) for name in SAVED}
                    checkpoint.load(found, checkpoint_id=where, process_group=loading)
                    for name, x in SAVED.items():
                        same(found[name]["model"]["x"], x)
                        same(found[name]["list"][0], x)
                        assert found[name]["model"]["x"].storage_layout == x.storage_layout


def distributed_masked(x: Any, size: int, placement: Placement) -> Any:
    mesh = DeviceMesh("cpu", list(range(size)))
    if distributed.get_rank() >= size:
        return None
    data, mask = (distribute_tensor(part, mesh, [placement]) for part in (x.get_data(), x.get_mask()))
    return md.as_masked_tensor(data, mask)


def gathered(x: Any) -> Any:
    return md.as_masked_tensor(x.get_data().full_tensor(), x.get_mask().full_tensor())


@SLOW.named("distributed tensors inside, in other placements and on another number of ranks")
def sharded(rank: int, ranks: int) -> None:
    x = of_rank(0, (5, 3))
    placements: list[Placement] = [Shard(0), Shard(1), Replicate()]
    groups = groups_of(ranks)
    for size in groups:
        for placement, other in zip(placements, [*placements[1:], placements[0]], strict=True):
            saved = distributed_masked(x, size, placement)
            with folder(rank) as where:
                if saved is not None:
                    checkpoint.save({"x": saved}, checkpoint_id=where, process_group=groups[size])
                target = ranks if size == 1 else 1
                empty = distributed_masked(md.as_masked_tensor(torch.zeros(5, 3).double()), target, other)
                copy = None if empty is None else empty + 0
                distributed.barrier()
                if empty is not None:
                    checkpoint.load({"x": empty}, checkpoint_id=where, process_group=groups[target])
                    same(gathered(empty), x)
                    assert gathered(copy).get_mask().all()
                whole = md.as_masked_tensor(torch.zeros(5, 3).double())
                checkpoint.load({"x": whole}, checkpoint_id=where)
                same(whole, x)


@CHECKS.named("distributed tensors inside, of which some ranks have nothing")
def empty_shards(rank: int, ranks: int) -> None:
    x = of_rank(0, (1, 3))
    with folder(rank) as where:
        checkpoint.save({"x": distributed_masked(x, ranks, Shard(0))}, checkpoint_id=where)
        for placement in (Shard(0), Replicate()):
            empty = distributed_masked(md.as_masked_tensor(torch.zeros(1, 3).double()), ranks, placement)
            checkpoint.load({"x": empty}, checkpoint_id=where)
            same(gathered(empty), x)


class Layer(nn.Module):
    def __init__(self, weight: Any, scale: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(2).double())
        self.register_buffer("scale", scale)


@CHECKS.named("a module with masked parameters and buffers, and its optimizer, asynchronously")
def modules(rank: int, ranks: int) -> None:
    weight, scale = of_rank(0, (2, 3)), of_rank(0, (2, 2)).to_sparse()
    model = Layer(weight, scale)
    optimizer = torch.optim.Adam(model.parameters())
    model.weight.square().sum().backward()
    optimizer.step()
    expected = model.weight.detach().clone()
    with folder(rank) as where:
        whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        written: Any = checkpoint.async_save(whole, checkpoint_id=where)
        with torch.no_grad():
            model.weight.fill_(0)
        written.result()
        distributed.barrier()
        other = Layer(torch.zeros_like(weight), md.as_masked_tensor(torch.ones(2, 2).double()).to_sparse())
        again = torch.optim.Adam(other.parameters())
        other.weight.sum().backward()
        again.step()
        found = {"model": other.state_dict(), "optimizer": again.state_dict()}
        checkpoint.load(found, checkpoint_id=where)
        other.load_state_dict(found["model"])
        again.load_state_dict(found["optimizer"])
        same(other.weight.detach(), expected)
        same(other.scale, scale)
        for one, loaded in zip(optimizer.state.values(), again.state.values(), strict=True):
            for name in ("exp_avg", "exp_avg_sq"):
                same(loaded[name], one[name])


@CHECKS.named("ranks that load into other tensors than were saved are all refused, and nothing is loaded")
def foreign(rank: int, ranks: int) -> None:
    x = of_rank(0)
    with folder(rank) as where:
        checkpoint.save({"first": torch.ones(2), "x": x}, checkpoint_id=where)
        mine: Tensor = x.to_sparse() if rank == 1 else x.clone().fill_(0)
        first = torch.zeros(2)
        raises(
            checkpoint.CheckpointException,
            lambda: checkpoint.load({"first": first, "x": mine}, checkpoint_id=where),
            "'x' is masked float64 of shape (3, 5) in the checkpoint, and masked float64 of shape (3, 5), stored as "
            "torch.sparse_coo here",
        )
        assert first.tolist() == [0, 0]
        if rank != 1:
            same(mine, x.clone().fill_(0))


@CHECKS.named("ranks that save other tensors under one name are all refused")
def differing(rank: int, ranks: int) -> None:
    with folder(rank) as where:
        mine: Tensor = torch.ones(3, 5).double() if rank == 1 else of_rank(0)
        raises(
            checkpoint.CheckpointException,
            lambda: checkpoint.save({"x": mine}, checkpoint_id=where),
            "rank 1 has plain float64 of shape (3, 5)",
        )
