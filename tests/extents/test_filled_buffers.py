"""A buffer filled step by step has the extent of its steps; views share it, and nothing else is there for a write."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from masked_dispatch import MaskedSemanticsError

LENGTHS = [3, 1, 0, 2]
THERE = torch.arange(4) < torch.tensor(LENGTHS)[:, None]


def batch(missing: bool = False) -> md.MaskedTensor:
    x = md.from_lengths(torch.arange(32.0).view(4, 4, 2), torch.tensor(LENGTHS))
    return x.mask_with(torch.tensor([[True, False], [True, True], [True, True], [False, True]])) if missing else x


def step(x: Any) -> Any:
    return (x * 2).tanh()


def by_steps(x: Any, buffer: Any) -> None:
    for t in range(x.shape[1]):
        buffer[:, t] = step(x[:, t])


def backwards(x: Any, buffer: Any) -> None:
    for t in reversed(range(x.shape[1])):
        buffer[:, t].copy_(step(x[:, t]))


def in_place(x: Any, buffer: Any) -> None:
    buffer.zero_()
    for t in range(x.shape[1]):
        buffer[:, t] += step(x[:, t])


def by_chunks(x: Any, buffer: Any) -> None:
    for t in range(0, x.shape[1], 2):
        buffer[:, t : t + 2] = step(x[:, t : t + 2])


def by_samples(x: Any, buffer: Any) -> None:
    for row in range(x.shape[0]):
        buffer[row] = step(x[row])


def transposed(x: Any, buffer: Any) -> None:
    for t in range(x.shape[1]):
        buffer.transpose(0, 1)[t] = step(x[:, t])


# (The programs of P9 fill buffers by features, as a whole, and by out=.)
WAYS: list[Callable[[Any, Any], None]] = [by_steps, backwards, in_place, by_chunks, by_samples, transposed]
BUFFERS: dict[str, Callable[[Any], Any]] = {
    "new_empty": lambda x: x.new_empty(x.shape),
    "new_zeros": lambda x: x.new_zeros(x.shape),
    "empty_like": torch.empty_like,
    "masked_tensor": lambda x: md.masked_tensor(torch.zeros(x.shape)),
    "clone": lambda x: x.clone(),
}


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer_has_the_extent_of_what_fills_it(name: str, way: Callable[..., None], missing: bool) -> None:
    x = batch(missing)
    buffer = BUFFERS[name](x)
    way(x, buffer)
    md.testing.assert_close(buffer, step(x), check_extent=True)
    assert buffer.numel() == 0 or buffer.extent.equal(x.extent)
    # And it goes on as the batch does.
    md.testing.assert_close(md.align(buffer).sum(1), step(x).sum(1), check_extent=True)


def test_a_plain_buffer_is_updated_and_has_no_extent() -> None:
    x, plain = batch(), torch.full((4, 4, 2), -1.0)
    with md.updates("silent"):
        by_steps(x, plain)
    assert plain.equal(step(x).to_tensor(-1.0))


# --------------------------------------------------------------------------------------------------------------- views


def test_views_share_what_a_write_changes() -> None:
    x = batch()
    buffer = x.new_zeros(4, 4, 2)
    views = {
        "row": (buffer[:, 1], lambda t: t[:, 1]),
        "steps": (buffer[:, 1:3], lambda t: t[:, 1:3]),
        "transposed": (buffer.transpose(1, 2), lambda t: t.transpose(1, 2)),
        "sample": (buffer[1], lambda t: t[1]),
        "feature": (buffer[..., :1], lambda t: t[..., :1]),
        "of a view": (buffer[1:].permute(2, 0, 1)[0, :, ::2], lambda t: t[1:].permute(2, 0, 1)[0, :, ::2]),
        "copy": (copy.copy(buffer), lambda t: t),
        "detached": (buffer.detach(), lambda t: t),
        "unsqueezed": (buffer[:, None].expand(4, 3, 4, 2), lambda t: t[:, None].expand(4, 3, 4, 2)),
    }
    assert all(view.extent is None for view, _ in views.values())
    by_steps(x, buffer)
    for name, (view, same) in views.items():
        assert view.extent.equal(same(x.extent)), name
        md.testing.assert_close(view, same(step(x)))
    assert views["row"][0].sum(1).extent.tolist() == [True, False, False, True]
    kept = step(x)
    buffer[0, 0] = md.masked_tensor(torch.zeros(2), torch.tensor([False, False]))
    assert kept.get_mask().equal(x.get_mask())  # what shares no memory does not change


def test_a_write_through_a_view_that_only_hides_values_leaves_the_positions() -> None:
    x = batch()
    row = x[:, 0]
    row[0] = md.masked_tensor(torch.ones(2), torch.tensor([True, False]))
    assert x.extent.equal(THERE[:, :, None].expand(4, 4, 2))
    assert int(x.count()) == 11
    assert x.mul_(2).extent.equal(THERE[:, :, None].expand(4, 4, 2))
    assert row.extent.tolist() == [[True, True], [True, True], [False, False], [True, True]]


def test_what_is_known_of_a_batch_outlives_writes_of_its_own_positions() -> None:
    x = batch()
    x[:, 1] = step(x[:, 1])
    x[:, 1:] += 1
    x.mul_(2)
    x[..., 0] = 7.0
    assert x._extent.known == batch()._extent.known
    assert x[:, :-1].extent[..., 0].sum(1).tolist() == [2, 0, 0, 1]


def test_a_deep_copy_has_a_family_of_its_own() -> None:
    x = batch()
    row = x[:, 0]
    copied = copy.deepcopy(x)
    copied[0, 2] = md.masked_tensor(torch.zeros(2), torch.tensor([True, False]))
    assert int(x.count()) == 12
    assert copied.extent.equal(x.extent)
    assert row.extent[:, 0].tolist() == [True, True, False, True]


def test_a_view_with_other_dimensions_is_taken_again() -> None:
    x = batch()
    buffer = x.new_zeros(4, 4, 2)
    merged = buffer.view(16, 2)
    merged[0] = 1.0  # a plain value changes no extent
    by_steps(x, buffer)
    with pytest.raises(
        MaskedSemanticsError, match=r"a view of shape \(16, 2\) has other dimensions than its base.*Take"
    ):
        merged.sum()
    assert buffer.view(16, 2).extent.equal(x.extent.reshape(16, 2))
    with pytest.raises(MaskedSemanticsError, match=r"what is written to a view of shape \(16, 2\) has other positions"):
        x.new_zeros(4, 4, 2).view(16, 2).copy_(step(x).reshape(16, 2))


def test_of_two_dimensions_nothing_says_which_numbers_positions() -> None:
    x = batch()
    with pytest.raises(MaskedSemanticsError, match=r"what is written to a view of shape \(4, 2\) has other positions"):
        x.new_zeros(4, 3, 4, 2)[:, 0, 1] = x[:, 1]


def test_memory_is_viewed_with_its_extent() -> None:
    x = batch()
    assert x.as_strided((4, 4), (8, 2)).extent.equal(x.extent[..., 0])
    with pytest.raises(MaskedSemanticsError, match="as_strided with other dimensions than its own does not carry"):
        x.as_strided((4, 3), (9, 2))


# -------------------------------------------------------------------------------------------------- what is not there


def test_an_assignment_makes_no_position_be_there() -> None:
    x = batch()
    x[:, 1] = 5.0
    x[0] = torch.ones(4, 2)
    x.fill_(3.0)
    x.copy_(torch.ones(4, 4, 2))
    assert x.extent.equal(x.get_mask())
    assert x.extent[..., 0].equal(THERE)
    assert x._extent.is_mask


def test_one_position_that_is_not_there_stays_so() -> None:
    x = batch()
    x[1, 2] = 5.0
    x[1, 2, 0].fill_(5.0)
    x[2].select(0, 0).zero_()
    assert x.get_mask()[..., 0].equal(THERE)
    x[0, 1] = md.masked_tensor(torch.zeros(2), torch.tensor([False, True]))
    x[0, 0] = 9.0
    assert x.extent[..., 0].equal(THERE)
    assert x[0].get_mask()[:, 0].tolist() == [True, False, True, False]


@pytest.mark.parametrize(
    "write",
    [
        lambda x, y: x.copy_(y),
        lambda x, y: x.__setitem__(slice(None), y),
        lambda x, y: x.__setitem__((slice(None), 2), y[:, 2]),
        lambda x, y: torch.mul(y, 1, out=x),
    ],
    ids=["copy_", "whole", "step", "out"],
)
def test_valid_elements_that_find_no_position_are_said(write: Callable[[Any, Any], object]) -> None:
    longer = md.from_lengths(torch.ones(4, 4, 2), torch.tensor([4, 4, 4, 4])).mask_with(torch.arange(4)[:, None] != 3)
    with pytest.warns(md.MaskDroppedWarning, match="the assignment to a padded tensor skips valid elements") as warned:
        write(x := batch(), longer)
    assert warned[0].filename == __file__
    assert x.extent[..., 0].equal(THERE)
    with md.updates("silent"):
        write(batch(), longer)
    refused = batch()
    with (
        md.updates("refuse"),
        pytest.raises(
            MaskedSemanticsError, match=r"would skip \d+ valid elements where it has no positions\. An assign"
        ),
    ):
        write(refused, longer)
    assert refused.get_data().equal(batch().get_data())


def test_layouts_that_meet_are_refused() -> None:
    x = batch()
    with pytest.raises(
        MaskedSemanticsError,
        match=r"^torch\.Tensor\.copy_: `self` and `src` have samples at different places.*align\(x, 1\)",
    ):
        x[:] = md.padded(md.masked_tensor(torch.ones(4, 4, 2), THERE.flip(1)[..., None]))


# ------------------------------------------------------------------------------------------------------------- in place

IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose_": lambda x: x.transpose_(1, 2),
    "swapaxes_": lambda x: x.swapaxes_(0, 1),
    "unsqueeze_": lambda x: x.unsqueeze_(1),
    "squeeze_": lambda x: x.squeeze_(),
    "t_": lambda x: x.select(2, 0).clone().t_(),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_dimensions_that_change_in_place_take_the_extent_along(name: str) -> None:
    x, change = batch(missing=True), IN_PLACE[name]
    expected = change(x.extent.clone())
    data, mask = change(x.get_data().clone()), change(x.get_mask())
    found = change(x)
    assert found.extent.equal(expected)
    assert found.get_mask().equal(mask)
    assert found.to_tensor(0).equal(data.where(mask, 0))
    moved = found.sum(0)
    assert moved.shape == data.sum(0).shape


def test_new_memory_takes_the_extent_of_what_it_is_given() -> None:
    x = batch()
    empty = md.masked_tensor(torch.empty(0))
    torch.mul(x, 2, out=empty)
    md.testing.assert_close(empty, x * 2, check_extent=True)
    y = md.masked_tensor(torch.zeros(4, 4, 2))
    y.data = x
    assert y.extent.equal(x.extent)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("own", [False, True])
def test_masked_scatter_of_rows_where_an_id_says_so(own: bool, side: str) -> None:
    there = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
    ids = torch.tensor([[1, 5, 2], [5, 1, 5]])
    if side == "left":
        there, ids = there.flip(1), ids.flip(1)
    data = torch.arange(12.0).view(2, 3, 2)
    x, names = md.masked_tensor(data, there[..., None].expand(2, 3, 2)), md.masked_tensor(ids, there)
    x, names = (
        md.padded(t, there[..., None] if t.ndim == 3 else there, dim=1) if own else md.padded(t) for t in (x, names)
    )
    rows = torch.tensor([[-1.0, -2], [-3, -4]], requires_grad=True)
    result = x.masked_scatter((names == 5)[..., None], rows)
    for b in range(2):
        alone = data[b][there[b]].masked_scatter((ids[b][there[b]] == 5)[:, None], rows[b])
        assert result[b].to_tensor(0)[there[b]].tolist() == alone.tolist()
    assert result.extent.tolist() == x.extent.tolist() == result.get_mask().tolist()
    result.sum().backward()
    assert rows.grad.tolist() == [[1, 1], [1, 1]]
    with pytest.raises(MaskedSemanticsError, match=r"x\[mask\] = source\[source.extent\]"):
        x.masked_scatter((names == 5)[..., None], x)
