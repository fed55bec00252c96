"""F.linear_cross_entropy in chunks, against each row by hand; what it gives away with a mask is memory, and no more."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from masked_dispatch import as_masked_tensor, is_masked_tensor, masked_tensor

if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
    pytest.skip("this torch has no options for linear_cross_entropy", allow_module_level=True)

from torch.nn import LinearCrossEntropyOptions

ROWS, FEATURES, CLASSES = 6, 4, 5


@pytest.fixture
def operands():
    torch.manual_seed(0)
    data = torch.randn(ROWS, FEATURES, dtype=torch.float64)
    mask = torch.rand(ROWS, FEATURES) < 0.7
    mask[2] = False
    target = torch.tensor([0, 4, 1, -100, 2, 3])
    weight = torch.randn(CLASSES, FEATURES, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(CLASSES, dtype=torch.float64, requires_grad=True)
    return data, mask, target, weight, bias


def by_hand(data, mask, target, weight, bias, known, reduction):
    """Each row's loss, from the features that are there, where target and row are."""
    losses, counted = [], 0
    for row in range(ROWS):
        if not (known[row] and mask[row].any()):
            continue
        if target[row] == -100:
            losses.append(torch.zeros((), dtype=data.dtype))
            continue
        kept = mask[row]
        logits = weight[:, kept] @ data[row, kept] + bias
        losses.append(-logits.log_softmax(0)[target[row]])
        counted += 1
    total = torch.stack(losses).sum()
    return {"sum": total, "mean": total / counted, "none": torch.stack(losses)}[reduction]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_each_row_is_as_if_alone(operands, reduction):
    data, mask, target, weight, bias = operands
    known = torch.tensor([True, True, True, True, True, False])
    wanted = by_hand(data.requires_grad_(), mask, target, weight, bias, known, reduction)
    gradients = torch.autograd.grad(wanted.sum(), [data, weight, bias])
    x = as_masked_tensor(torch.where(mask, data.detach(), math.nan), mask).detach().requires_grad_()
    y = as_masked_tensor(torch.where(known, target, 10**9), known)
    options = LinearCrossEntropyOptions(batch_chunk_size=2)
    loss = F.linear_cross_entropy(x, weight, y, linear_bias=bias, reduction=reduction, options=options)
    valid = known & mask.any(1)
    assert loss.get_mask().equal(valid if reduction == "none" else torch.tensor(True))
    torch.testing.assert_close(loss[valid].to_tensor(0) if reduction == "none" else loss.to_tensor(0), wanted)
    loss.to_tensor(0).sum().backward()
    assert x.grad.get_mask().equal(mask)
    torch.testing.assert_close(x.grad.to_tensor(0), gradients[0])
    for parameter, gradient in ((weight, gradients[1]), (bias, gradients[2])):
        assert not is_masked_tensor(parameter.grad)
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_chunks_are_the_reference(operands, reduction):
    data, mask, target, weight, bias = operands
    classes = masked_tensor(torch.rand(CLASSES, dtype=torch.float64), torch.tensor([True] * 4 + [False]))
    x = masked_tensor(data, mask)
    losses = [
        F.linear_cross_entropy(
            x, weight, target, linear_bias=bias, weight=classes, reduction=reduction, options=options
        )
        for options in (None, LinearCrossEntropyOptions(batch_chunk_size=4))
    ]
    assert losses[0].get_mask().equal(losses[1].get_mask())
    torch.testing.assert_close(losses[0].to_tensor(0), losses[1].to_tensor(0))


def test_a_mask_leaves_the_accumulation_dtype(operands):
    data, mask, target, weight, _ = operands
    options = LinearCrossEntropyOptions(acc_dtype=torch.float32)
    half = masked_tensor(data.to(torch.bfloat16), mask)
    loss = F.linear_cross_entropy(half, weight.detach().to(torch.bfloat16), target, options=options)
    wide = F.linear_cross_entropy(half.float(), weight.detach().to(torch.bfloat16).float(), target)
    assert loss.dtype is torch.bfloat16
    assert loss.item() == wide.to(torch.bfloat16).item()


def test_with_nothing_masked_the_chunks_compute(operands):
    data, _, target, weight, bias = operands
    options = LinearCrossEntropyOptions(batch_chunk_size=2)
    plain = F.linear_cross_entropy(data, weight, target, linear_bias=bias, options=options)
    mine = F.linear_cross_entropy(masked_tensor(data), weight, target, linear_bias=bias, options=options)
    assert mine.get_data().equal(plain)
    assert torch.autograd.grad(mine.to_tensor(0), weight)[0].equal(torch.autograd.grad(plain, weight)[0])
