"""Alignments of sequences with their targets, all or nothing for each sample, against plain torch."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import masked_dispatch as md
from op_registry import MaskedSemanticsError
from padded_slices import GARBAGE, same, wrapped

aten = torch.ops.aten


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


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("hidden", GARBAGE)
def test_a_sample_with_a_hole_has_no_loss(reduction: str, hidden: float) -> None:
    """One score, one target and one length are missing, each in another sample."""
    scores, scores_mask, targets, targets_mask, inputs, labels = alignments()
    scores_mask[2, 0, 1], targets_mask[1, 0] = False, False
    known = torch.tensor([True, True, False, True])
    x = wrapped(scores, scores_mask, hidden)
    hidden_targets = md.masked_tensor(torch.where(targets_mask, targets, 2**40), targets_mask)
    hidden_inputs = md.masked_tensor(torch.where(known, inputs, -(2**40)), known)
    loss = F.ctc_loss(x, hidden_targets, hidden_inputs, labels, reduction=reduction)
    plain = scores.clone().requires_grad_()
    alone = F.ctc_loss(plain[:, 3:], targets[3:], inputs[3:], labels[3:], reduction=reduction)
    if reduction == "none":
        assert loss.get_mask().tolist() == [False, False, False, True]
    torch.testing.assert_close(
        loss.get_data()[loss.get_mask()], alone.reshape(-1) if reduction == "none" else alone.reshape(1)
    )
    (slope,), (expected,) = torch.autograd.grad(loss.sum(), x), torch.autograd.grad(alone.sum(), plain)
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
