"""What is known of padding goes wherever a mask goes: files, copies, processes, modules, devices."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import masked_dispatch as md
from masked_dispatch.tensor.masked_tensor import MaskedTensor

# What this library wrote with the third version of the format.
SAVED = Path(__file__).with_name("saved_by_version_3.pt")


def padded() -> MaskedTensor:
    """A batch that is padded and has no missing values: its extent is its mask."""
    return md.from_lengths(torch.arange(12.0).reshape(2, 3, 2), torch.tensor([3, 1]))


def missing() -> MaskedTensor:
    """The same batch, with a missing step in its first sample."""
    return padded().mask_with(torch.tensor([[True], [False], [True]]))


# Kinds of extents that tests/distributed/test_what_arrives.py, which asks every way of copying, does not have.
EXTENTS: dict[str, Callable[[], MaskedTensor]] = {
    "two dimensions": lambda: padded() @ padded().transpose(1, 2),
    "merged dimensions": lambda: missing().flatten(0, 1),
    "joined": lambda: torch.cat([missing(), torch.ones(2, 2, 2)], 1),
    "packed, seen otherwise": lambda: missing().to_packed().unflatten(-1, (1, 2)).transpose(1, 2),
}


def check_same(x: Any, y: Any) -> None:
    """The same values, mask, extent and knowledge of it."""
    md.testing.assert_close(x, y, rtol=0, atol=0)
    assert x._extent.known == y._extent.known
    assert x._extent.is_mask == y._extent.is_mask
    assert [f.said is None for f in x._extent.factors] == [f.said is None for f in y._extent.factors]
    if y.extent is not None:
        assert x.extent.tolist() == y.extent.tolist()


def saved(x: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(x, buffer)
    return buffer.getvalue()


def loaded(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=True)


@pytest.mark.parametrize("name", EXTENTS)
def test_copies_and_files_have_the_extent(name: str) -> None:
    x = EXTENTS[name]()
    for again in (loaded(saved(x)), copy.copy(x), loaded(saved(nn.Parameter(x))).detach()):
        check_same(again, x)


def test_a_file_of_a_batch_that_is_only_padded_has_no_boolean_of_it() -> None:
    batch = md.from_lengths(torch.zeros(64, 512, 2), torch.arange(64))
    without, with_extent = len(saved(batch)), len(saved(md.padded(batch)))
    assert with_extent - without < 200


def test_a_file_of_the_third_version_is_read() -> None:
    found = loaded(SAVED.read_bytes())
    x = md.masked_tensor(torch.arange(6.0).reshape(2, 3), torch.tensor([[True, False, True], [True, True, False]]))
    expected = {"x": x, "row": x[1], "parameter": nn.Parameter(x * 2), "plain": md.masked_tensor(torch.ones(2))}
    assert found.keys() == {*expected, "packed"}
    for name, tensor in expected.items():
        md.testing.assert_close(found[name], tensor, rtol=0, atol=0)
        assert found[name].extent is None
    md.testing.assert_close(found["packed"].to_dense(), x, rtol=0, atol=0)
    found["row"].fill_(7.0)
    assert found["x"][1].get_mask().all(), "the mask is shared in the file as before"


def test_share_memory_keeps_it() -> None:
    x, expected = missing().share_memory_(), missing()
    check_same(x, expected)


def test_modules_carry_it() -> None:
    module = nn.Module()
    module.weight, module.running = nn.Parameter(missing()), nn.Buffer(padded())
    state = loaded(saved(module.state_dict()))
    check_same(state["weight"], missing())
    module.double()
    check_same(module.weight.detach(), missing().double())
    check_same(module.running, padded().double())
    for assign in (False, True):
        other = nn.Module()
        other.weight = nn.Parameter(md.masked_tensor(torch.zeros(2, 3, 2)))
        other.running = nn.Buffer(md.masked_tensor(torch.zeros(2, 3, 2)))
        other.load_state_dict(state, assign=assign)
        check_same(other.weight.detach(), missing())
        check_same(other.running, padded())


def test_a_copy_into_a_batch_intersects() -> None:
    x = md.from_lengths(torch.zeros(2, 3, 2), torch.tensor([2, 2]))
    with pytest.warns(md.MaskDroppedWarning, match="skips valid elements where it has no positions"):
        x.copy_(missing())
    assert x.extent[..., 0].tolist() == [[True, True, False], [True, False, False]]
    assert x.get_mask()[..., 0].tolist() == [[True, False, False], [True, False, False]]
    x.copy_(torch.ones(2, 3, 2))
    assert x.get_mask().tolist() == x.extent.tolist()


def test_data_that_is_exchanged_brings_its_own() -> None:
    x = missing()
    x.data = md.masked_tensor(torch.zeros(2, 3, 2))
    assert x.extent is None
    x.data = padded()
    check_same(x, padded())


def test_devices_have_their_booleans() -> None:
    x = missing().to("meta")
    (factor,) = x._extent.factors
    assert factor.there.device.type == "meta"
    assert x.extent.device.type == "meta"


@pytest.mark.parametrize("missing_steps", [False, True])
def test_examples_that_are_collated_keep_their_positions(missing_steps: bool) -> None:
    x = md.from_lengths(torch.ones(4, 3, 2), torch.tensor([3, 1, 0, 2]))
    x = x.mask_with(torch.tensor([[False], [True], [True]])) if missing_steps else x
    (batch,) = DataLoader([{"x": row} for row in x], batch_size=4)
    check_same(batch["x"], x)


def test_an_example_without_an_extent_is_there_everywhere() -> None:
    x = md.from_lengths(torch.ones(2, 3), torch.tensor([3, 1]))
    (batch,) = DataLoader([torch.zeros(3), x[1]], batch_size=2)
    check_same(batch, x * torch.tensor([[0.0], [1.0]]))


def test_examples_that_know_by_different_dimensions_are_not_collated() -> None:
    square = missing()[0, :2]
    text = r"default_collate: tensors of shape \(2, 2\) know by different dimensions which of their positions are there"
    with pytest.raises(md.MaskedSemanticsError, match=text):
        list(DataLoader([square, square.t()], batch_size=2))
