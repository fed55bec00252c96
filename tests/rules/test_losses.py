"""Losses: half precision, autocast, ignored rows, labels out of range; alignments; chunks.

What each loss gives, reduced and not, with its gradients, the laws ask by oracles that run row by row
(op_registry/conformance/oracles/losses.py).
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import masked_dispatch as md
from bare_records import apply, seen
from masked_dispatch import masked_tensor
from op_registry import MaskedSemanticsError
from op_registry.authoring import Dense
from padded_slices import same, wrapped

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2


def half(shape, seed):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.6


def test_a_mean_by_hand():
    x = Dense(torch.tensor([1.0, math.nan, 5.0]), torch.tensor([1, 0, 1], dtype=torch.int8))
    y = Dense(torch.tensor([0.0, 0.0, 3.0]))
    assert apply(aten.mse_loss.default, x, y).data.item() == 2.5
    assert apply(aten.l1_loss.default, x, y, SUM).data.item() == 3.0


def test_sums_of_half_precision_are_rounded_once():
    x = torch.full((3000,), 1.0, dtype=torch.bfloat16)
    mask = torch.ones(3000, dtype=torch.int8)
    mask[1::3] = 0
    result = apply(aten.mse_loss.default, Dense(x, mask), Dense(torch.zeros_like(x)))
    assert result.dtype is torch.bfloat16
    assert result.data.item() == 1.0


def test_losses_are_float32_under_autocast():
    x = Dense(torch.randn(4, 3, dtype=torch.bfloat16), half((4, 3), 0).to(torch.int8))
    labels = Dense(torch.tensor([0, 1, 2, 0]))
    y = Dense(torch.randn(4, 3, dtype=torch.bfloat16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for result in (
            apply(aten.mse_loss.default, x, y),
            apply(aten.l1_loss.default, x, y),
            apply(aten.cross_entropy_loss.default, x, labels),
            apply(aten.cross_entropy_loss.default, x, labels, label_smoothing=0.1),
            apply(aten.triplet_margin_loss.default, x, y, y),
            apply(aten.multi_margin_loss.default, x, labels),
        ):
            assert result.dtype is torch.float32


# ------------------------------------------------------------------------------------------------------ over classes


def test_ignored_rows_are_valid_zeros_and_a_mean_of_them_is_torchs():
    x = Dense(torch.randn(2, 3), torch.zeros(2, 3, dtype=torch.int8))
    ignored = Dense(torch.tensor([-100, -100]))
    for op in (aten.nll_loss_nd.default, aten.cross_entropy_loss.default):
        assert torch.equal(seen(apply(op, x, ignored, None, NONE))[0], torch.tensor([True, True]))
        mean = apply(op, x, ignored, None, MEAN)
        assert mean.valid is None or mean.valid.item()
        assert mean.data.isnan()


def test_a_label_out_of_range_is_refused_where_it_is_valid():
    x = Dense(torch.randn(2, 3), torch.tensor([[1, 0, 1], [1, 1, 0]], dtype=torch.int8))
    with pytest.raises(IndexError, match="out of bounds"):
        apply(aten.cross_entropy_loss.default, x, Dense(torch.tensor([0, 5])))
    apply(aten.cross_entropy_loss.default, x, Dense(torch.tensor([0, 5]), torch.tensor([1, 0], dtype=torch.int8)))


def test_small_labels_can_be_ignored_too():
    x = Dense(torch.randn(3, 4))
    labels = Dense(torch.tensor([1, 2, 255], dtype=torch.uint8), torch.tensor([1, 1, 0], dtype=torch.int8))
    result = apply(aten.nll_loss.default, x, labels)
    torch.testing.assert_close(result.data, -(x.data[0, 1] + x.data[1, 2]) / 2)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_smoothing_counts_the_valid_classes(reduction):
    x, known = torch.tensor([[0.1, 9.0, 0.4, 0.8]]), torch.tensor([True, False, True, True])
    shares, options = torch.tensor([[0.1, 0.2, 0.3, 0.4]]), {"label_smoothing": 0.2, "reduction": reduction}
    for weight in (None, torch.tensor([1.0, 2.0, 3.0, 4.0])):
        kept = None if weight is None else weight[known]
        for target, alone in ((torch.tensor([2]), torch.tensor([1])), (shares, shares[:, known])):
            found = F.cross_entropy(masked_tensor(x, known[None]), target, weight, **options)
            torch.testing.assert_close(found.to_tensor(0), F.cross_entropy(x[:, known], alone, kept, **options))


def test_a_triplet_with_swap_needs_all_three_distances():
    """Positive and negative have no common coordinate."""
    half = torch.tensor([[True, True, False, False]])
    anchor, positive, negative = torch.zeros(1, 4), masked_tensor(torch.ones(1, 4), half), torch.ones(1, 4)
    for swap in (False, True):
        options = {"reduction": "none", "swap": swap}
        loss = F.triplet_margin_loss(anchor, positive, masked_tensor(negative, ~half), **options)
        assert loss.get_mask().item() is not swap
        assert F.triplet_margin_loss(anchor, positive, negative, **options).get_mask().item()


def test_many_labels_end_at_the_first_that_is_minus_one():
    x = Dense(torch.tensor([[0.1, math.nan, 0.4, 0.8]] * 3), torch.tensor([[1, 0, 1, 1]] * 3, dtype=torch.int8))
    labels = Dense(
        torch.tensor([[3, -1, 99, 99], [3, 0, -1, 99], [1, -1, 0, 0]]),
        torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1]], dtype=torch.int8),
    )
    mask, values = seen(apply(aten.multilabel_margin_loss.default, x, labels, NONE))
    # The second row's labels have a hole, the third's point at an invalid class.
    assert mask.tolist() == [True, False, False]
    alone = F.multilabel_margin_loss(torch.tensor([[0.1, 0.4, 0.8]]), torch.tensor([[2, -1, 0]]))
    torch.testing.assert_close(values[0], alone)


# ------------------------------------------------------------------------- alignments of sequences with their targets


def alignments() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    scores = torch.randn(8, 4, 5, dtype=torch.float64).log_softmax(-1)
    targets = torch.randint(1, 5, (4, 3))
    inputs, labels = torch.tensor([8, 6, 7, 8]), torch.tensor([3, 2, 1, 3])
    scores_mask = (torch.arange(8)[:, None] < inputs)[..., None].expand(scores.shape).clone()
    return scores, scores_mask, targets, torch.arange(3) < labels[:, None], inputs, labels


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("as_tensors", [True, False])
def test_alignments_under_the_masks_of_their_lengths(reduction: str, as_tensors: bool) -> None:
    """Padding beyond the lengths is not read: every sample is valid, and equals plain torch's."""
    scores, scores_mask, targets, targets_mask, inputs, labels = alignments()
    x = wrapped(scores, scores_mask, math.nan)
    lengths = (inputs, labels) if as_tensors else (inputs.tolist(), labels.tolist())
    loss = F.ctc_loss(x, md.masked_tensor(targets, targets_mask), *lengths, reduction=reduction)
    plain = scores.clone().requires_grad_()
    wanted = F.ctc_loss(plain, targets, *lengths, reduction=reduction)
    same(loss, wanted, torch.tensor(True))
    (slope,), (expected,) = torch.autograd.grad(loss.sum(), x), torch.autograd.grad(wanted.sum(), plain)
    same(slope, expected, scores_mask)


def test_one_sequence_and_concatenated_targets() -> None:
    scores, scores_mask, targets, _, inputs, labels = alignments()
    joined = torch.cat([row[:n] for row, n in zip(targets, labels.tolist(), strict=True)])
    known = torch.arange(len(joined)) != 4  # the second target of sample 1
    loss = F.ctc_loss(wrapped(scores, scores_mask), md.masked_tensor(joined, known), inputs, labels, reduction="none")
    same(loss, F.ctc_loss(scores, joined, inputs, labels, reduction="none"), torch.tensor([True, False, True, True]))
    alone = F.ctc_loss(wrapped(scores[:, 1], scores_mask[:, 1], math.nan), targets[1, :2], [6], [2])
    same(alone, F.ctc_loss(scores[:, 1], targets[1, :2], [6], [2]), torch.tensor(True))


def test_concatenated_targets_of_unknown_length_are_refused() -> None:
    scores, _, targets, _, inputs, labels = alignments()
    lengths = md.masked_tensor(labels, torch.tensor([True, False, True, True]))
    with pytest.raises(MaskedSemanticsError, match=r"where the targets of the next sample begin is then unknown\. Pad"):
        F.ctc_loss(scores, targets.reshape(-1), inputs, lengths)


def test_infinite_losses_are_zeroed_on_request() -> None:
    scores, scores_mask, targets, _, _, labels = alignments()
    x = wrapped(scores, scores_mask)
    loss = F.ctc_loss(x, targets, [8, 1, 7, 8], labels.tolist(), reduction="none", zero_infinity=True)
    assert loss[1].item() == 0
    (slope,) = torch.autograd.grad(loss.sum(), x)
    assert slope.get_data()[slope.get_mask()].isfinite().all()


# ----------------------------------------------------------------------------------- F.linear_cross_entropy in chunks


needs_options = pytest.mark.skipif(not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="torch has none")


@pytest.fixture
def operands():
    torch.manual_seed(0)
    data = torch.randn(6, 4, dtype=torch.float64)
    mask = torch.rand(6, 4) < 0.7
    mask[2] = False
    target = torch.tensor([0, 4, 1, -100, 2, 3])
    weight = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(5, dtype=torch.float64, requires_grad=True)
    return data, mask, target, weight, bias


@needs_options
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_chunks_are_the_reference(operands, reduction):
    data, mask, target, weight, bias = operands
    classes = masked_tensor(torch.rand(5, dtype=torch.float64), torch.tensor([True] * 4 + [False]))
    x = masked_tensor(data, mask)
    losses = [
        F.linear_cross_entropy(
            x, weight, target, linear_bias=bias, weight=classes, reduction=reduction, options=options
        )
        for options in (None, torch.nn.LinearCrossEntropyOptions(batch_chunk_size=4))
    ]
    assert losses[0].get_mask().equal(losses[1].get_mask())
    torch.testing.assert_close(losses[0].to_tensor(0), losses[1].to_tensor(0))


@needs_options
def test_a_mask_leaves_the_accumulation_dtype(operands):
    data, mask, target, weight, _ = operands
    options = torch.nn.LinearCrossEntropyOptions(acc_dtype=torch.float32)
    half = masked_tensor(data.to(torch.bfloat16), mask)
    loss = F.linear_cross_entropy(half, weight.detach().to(torch.bfloat16), target, options=options)
    wide = F.linear_cross_entropy(half.float(), weight.detach().to(torch.bfloat16).float(), target)
    assert loss.dtype is torch.bfloat16
    assert loss.item() == wide.to(torch.bfloat16).item()
