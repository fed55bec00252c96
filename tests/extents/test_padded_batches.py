"""A padded batch is its samples: small cases that an eye can check. P9 asks operators, and programs of them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import masked_dispatch as md
from loops_over_samples import KERNEL, batch
from masked_dispatch import MaskedSemanticsError


def test_the_lines_of_two_ones() -> None:
    x = md.from_lengths(torch.ones(2, 4), torch.tensor([4, 2]))[:, None]
    kernel = torch.ones(1, 1, 3)
    assert F.conv1d(x, kernel, padding=2)[..., :-2].count(2).tolist() == [[4], [2]]
    assert F.conv1d(F.pad(x, (1, 1)), kernel).count(2).tolist() == [[4], [2]]
    assert F.conv_transpose1d(x, torch.ones(1, 1, 4), stride=2)[..., 1:-1].count(2).tolist() == [[8], [4]]
    assert F.interpolate(x, scale_factor=2.0, mode="linear").count(2).tolist() == [[8], [4]]


def test_an_extent_is_the_mask_where_nothing_is_missing() -> None:
    x = md.from_lengths(torch.ones(2, 3, 1), torch.tensor([3, 1]))
    assert x.extent.tolist() == x.get_mask().tolist()
    missing = x.mask_with(torch.tensor([[True], [False], [True]]))
    assert missing.extent.tolist() == x.extent.tolist()
    assert missing.get_mask().flatten(1).tolist() == [[True, False, True], [True, False, False]]
    assert x.without_extent().extent is None
    assert md.masked_tensor(torch.ones(2)).extent is None


def test_one_position_that_is_merged_with_features_is_sorted() -> None:
    x = md.from_lengths(torch.tensor([[[3.0], [1.0]], [[2.0], [5.0]]]), torch.tensor([1, 0]), dim=2)
    assert x.flatten(1).sort(1)[0].to_tensor(0).tolist() == [[1, 3], [0, 0]]


def test_windows_sum_over_channels_that_are_positions_too() -> None:
    """One column of an image goes with its features: the channels of a convolution along the rows."""
    image = torch.randn(3, 2, 4, 1, dtype=torch.float64)
    rows, columns = torch.tensor([4, 2, 3]), torch.tensor([1, 1, 0])
    there = (torch.arange(4)[:, None] < rows[:, None, None, None]) & (torch.arange(1) < columns[:, None, None, None])

    def f(x: Tensor) -> Tensor:
        return F.conv1d(x.permute(0, 2, 3, 1).flatten(1, 2).transpose(1, 2), KERNEL, stride=2, padding=1)

    result = f(md.padded(image, there.expand(image.shape)))
    assert result.extent.sum((1, 2)).tolist() == [4, 2, 0]
    torch.testing.assert_close(result[1:2, :, :1].to_tensor(0), f(image[1:2, :, :2]))


def test_a_reduction_leaves_no_trace() -> None:
    x, _ = batch(2)
    assert x.mean(1).extent is None
    assert x.mean(1).get_mask().all(1).tolist() == [True, True, False, True]  # nothing is left of the empty sample
    assert x.sum(2).extent.tolist() == x.extent[..., 0].tolist()


def test_a_positive_stop_counts_in_the_batch() -> None:
    x, _ = batch(2)
    assert x[:, :3].extent[..., 0].sum(1).tolist() == [3, 2, 0, 3]
    left, _ = batch(2, side="left")
    own = r"masked_dispatch\.align\(x, 1\) count from each sample's own, as masked_dispatch\.first\(x, 1, 3\) \("
    with pytest.raises(MaskedSemanticsError, match=rf"x\[:, :3\] counts from the start of the batch.* {own}"):
        left[:, :3]
    assert md.first(left, 1, 3).extent[..., 0].sum(1).tolist() == [3, 2, 0, 3]
    with pytest.raises(MaskedSemanticsError, match=r"x\[:, ::2\] counts from the start"):
        left[:, ::2]


def test_parts_of_a_join_come_back() -> None:
    x, _ = batch(2)
    tokens = torch.ones(4, 2, 2, dtype=torch.float64)
    joined = torch.cat([x, tokens], 1)
    assert joined.extent[..., 0].sum(1).tolist() == [6, 4, 2, 5]
    assert joined[:, :-2].extent.tolist() == x.extent.tolist()
    with pytest.raises(MaskedSemanticsError, match="between the positions of a sample"):
        joined[:, 1:]


def test_what_has_no_meaning_within_samples_is_refused() -> None:
    x, _ = batch(2)
    with pytest.raises(
        MaskedSemanticsError, match=r"reflection_pad1d\): its windows may read beyond the end of a sample"
    ):
        F.pad(x.transpose(1, 2), (1, 1), mode="reflect")
    with pytest.raises(MaskedSemanticsError, match=r"rfft.*: a slice that lies in padding in part has no result"):
        torch.fft.rfft(x, dim=1)
    with pytest.raises(MaskedSemanticsError, match="would scale each sample by its own length"):
        F.interpolate(x.transpose(1, 2), size=8)
    with pytest.raises(MaskedSemanticsError, match="a slice that lies in padding in part has no result"):
        torch.linalg.inv(x @ x.transpose(1, 2))


def test_what_is_no_extent_is_refused() -> None:
    x = md.from_lengths(torch.ones(2, 3), torch.tensor([3, 1]))
    with pytest.raises(
        ValueError, match="2 elements of the tensor of shape \\(2, 3\\) are valid where the extent says"
    ):
        md.padded(x, torch.tensor([[True, False, False]]))
    with pytest.raises(TypeError, match=r"extent has to be a plain bool tensor.*; got torch\.float32"):
        md.padded(x, torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"extent of shape \(3, 2\) does not broadcast to \(2, 3\)"):
        md.padded(x, torch.ones(3, 2, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"padded takes a masked tensor, or a plain one with its extent"):
        md.padded(torch.ones(2, 3))
    with pytest.raises(ValueError, match="dimension 0 numbers samples"):
        md.padded(x, dim=0)


def test_no_call_keeps_a_tensor_alive() -> None:
    gc.collect()
    gc.disable()  # no cycle is made
    try:
        x, _ = batch(2)
        scores = x @ x.transpose(1, 2)
        mixed = torch.cat([x, scores.softmax(-1) @ x], -1)
        kept = [weakref.ref(t._data) for t in (x, scores, mixed, mixed[:, 1:-1].sort(1)[0], mixed.unfold(1, 2, 1))]
        del x, scores, mixed
        assert [ref() for ref in kept] == [None] * len(kept)
    finally:
        gc.enable()
