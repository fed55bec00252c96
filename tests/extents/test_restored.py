"""Restoring replaces what a tensor knew of its padding, where an assignment intersects: no position is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint

import masked_dispatch as md
from comparison import same_extents as same

LENGTHS = torch.tensor([2, 4])
OTHERS = torch.tensor([4, 1])
DATA = torch.arange(16.0).view(2, 4, 2)


def batch(lengths: Tensor, form: str) -> md.MaskedTensor:
    x = md.from_lengths(DATA.clone(), lengths)
    if form == "front":
        return md.padded(md.masked_tensor(DATA, x.get_mask().flip(1)), dim=1)
    return x if form == "mask" else x.mask_with(DATA != 2)


STORED: dict[str, Callable[[md.MaskedTensor], md.MaskedTensor]] = {
    "dense": lambda x: x,
    "packed": lambda x: x.to_packed(),
    "coo": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_layout(torch.sparse_csr, sparse_dim=2),
}


def holding(x: Tensor) -> nn.Module:
    module = nn.Module()
    module.part = nn.Module()
    module.part.x, module.part.w = nn.Buffer(x), nn.Parameter(x.detach().clone())
    return module


@pytest.mark.parametrize("storage", STORED)
@pytest.mark.parametrize("form", ["mask", "holes", "front"])
def test_load_state_dict_replaces(form: str, storage: str) -> None:
    source = holding(STORED[storage](batch(LENGTHS, form)))
    target = holding(STORED[storage](batch(OTHERS, "mask")))
    for tensor in (target.part.x, target.part.w):
        tensor.detach()  # a view of the same memory, which knows what the tensor knows
    target.load_state_dict(source.state_dict())
    same(target.part.x.to_dense(), batch(LENGTHS, form))
    same(target.part.w.detach().to_dense(), batch(LENGTHS, form))


@pytest.mark.parametrize("storage", ["dense", "packed"])
def test_what_arrives_without_an_extent_is_there_everywhere(storage: str) -> None:
    target = holding(STORED["dense"](batch(OTHERS, "mask")))
    target.load_state_dict(holding(batch(LENGTHS, "mask").without_extent()).state_dict())
    assert target.part.x.extent is None
    assert target.part.x.get_mask().tolist() == batch(LENGTHS, "mask").get_mask().tolist()
    target.load_state_dict({"part.x": DATA, "part.w": DATA})
    assert target.part.x.get_mask().all()
    assert target.part.w.extent is None


def test_a_view_learns_of_it() -> None:
    target = holding(batch(OTHERS, "mask"))
    view = target.part.x[:, :, 0]
    target.load_state_dict(holding(batch(LENGTHS, "holes")).state_dict())
    same(view, batch(LENGTHS, "holes")[:, :, 0])


def test_a_state_of_another_shape_changes_nothing() -> None:
    target = holding(batch(OTHERS, "mask"))
    with pytest.raises(RuntimeError, match="size mismatch"):
        target.load_state_dict({"part.x": DATA[:1], "part.w": DATA[:1]})
    same(target.part.x, batch(OTHERS, "mask"))


def test_a_copy_inside_a_hook_is_an_assignment() -> None:
    target, other = holding(batch(OTHERS, "mask")), batch(OTHERS, "mask")

    def hook(*_: object) -> None:
        other.copy_(DATA)

    target.part.register_load_state_dict_pre_hook(hook)
    target.load_state_dict(holding(batch(LENGTHS, "mask")).state_dict())
    assert other.extent.tolist() == batch(OTHERS, "mask").extent.tolist()
    same(target.part.x, batch(LENGTHS, "mask"))


@pytest.mark.parametrize("storage", ["dense", "packed"])
@pytest.mark.parametrize("form", ["mask", "holes", "front"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_replaces(form: str, storage: str, tmp_path: object) -> None:
    checkpoint.save({"x": STORED[storage](batch(LENGTHS, form))}, checkpoint_id=tmp_path)
    target = batch(OTHERS, "mask") if storage == "dense" else STORED[storage](batch(LENGTHS, form))
    view = target[:, :, 0] if storage == "dense" else None
    state = {"x": target}
    checkpoint.load(state, checkpoint_id=tmp_path)
    same(state["x"].to_dense(), batch(LENGTHS, form))
    if view is not None:
        same(view, batch(LENGTHS, form)[:, :, 0])
