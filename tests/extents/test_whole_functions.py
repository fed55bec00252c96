"""Functions that torch writes in Python: of a padded batch they give what they give of its steps, one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn
from torch.nn import functional as F

import masked_dispatch as md

LENGTHS = torch.tensor([4, 2, 0, 3])
STORED = {"dense": lambda x: x, "packed": lambda x: x.to_packed(), "coo": lambda x: x.to_sparse()}
# Two operands of steps (…, 3): real numbers, and numbers between 0 and 1. One number, or one for each step.
FUNCTIONS: dict[str, Callable[[Any, Any], Tensor]] = {
    "gaussian_nll_loss": lambda x, p: F.gaussian_nll_loss(x, x.sin(), p),
    "gaussian_nll_loss, each": lambda x, p: F.gaussian_nll_loss(x, x.sin(), p, reduction="none"),
    "poisson_nll_loss": lambda x, p: F.poisson_nll_loss(x, p, full=True),
    "multilabel_soft_margin_loss": lambda x, p: F.multilabel_soft_margin_loss(flat(x), flat(p)),
    "cosine_embedding_loss": lambda x, p: F.cosine_embedding_loss(flat(x), flat(p), flat(p)[:, 0].sign()),
    "triplet_margin_loss": lambda x, p: F.triplet_margin_loss(flat(x), flat(p), flat(p * 2)),
    "triplet_margin_with_distance_loss": lambda x, p: F.triplet_margin_with_distance_loss(x, p, p * 2),
    "margin_ranking_loss": lambda x, p: F.margin_ranking_loss(x, p, p.sign()),
    "hinge_embedding_loss": lambda x, p: F.hinge_embedding_loss(x, p.sign()),
    "kl_div": lambda x, p: F.kl_div(x.log_softmax(-1), p),
    "kl_div, batchmean": lambda x, p: F.kl_div(flat(x).log_softmax(-1), flat(p), reduction="batchmean"),
    "binary_cross_entropy": F.binary_cross_entropy,
    "binary_cross_entropy, flipped": lambda x, p: F.binary_cross_entropy(p, x.sigmoid()),
    "huber_loss": F.huber_loss,
    "cosine_similarity": lambda x, p: F.cosine_similarity(x, p, -1),
    "pairwise_distance": F.pairwise_distance,
    "normalize": lambda x, p: F.normalize(x, dim=-1) * p,
    "gumbel, none drawn": lambda x, p: distributions.Gumbel(x, p).entropy(),
    "log_prob of Normal": lambda x, p: distributions.Normal(x, p).log_prob(p),
    "log_prob of Categorical": lambda x, p: distributions.Categorical(logits=x).entropy(),
    "KL of Bernoulli": lambda x, p: distributions.kl_divergence(
        distributions.Bernoulli(logits=x), distributions.Bernoulli(p)
    ),
    "log_prob of LogNormal": lambda x, p: distributions.LogNormal(x, p).log_prob(p),
    "masked mean": lambda x, p: torch.masked.mean(x * p, -1),
    "masked deviation": lambda x, p: torch.masked.std(x * p, -1),
}


def flat(x: Tensor) -> Tensor:
    return x.flatten(0, -2)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")  # of kl_div
@pytest.mark.parametrize("storage", STORED)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_padded_batch_is_its_steps(name: str, storage: str) -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(4, 4, 3, dtype=torch.float64, generator=generator)
    there = torch.arange(4) < LENGTHS[:, None]
    steps = [t[there].requires_grad_() for t in (numbers, numbers.sigmoid().flip(0, 1))]
    padded = [numbers, numbers.sigmoid().flip(0, 1)]
    if name == "binary_cross_entropy":
        steps[0], padded[0] = (t.detach().sigmoid().requires_grad_() for t in (steps[0], padded[0]))
    given = [
        STORED[storage](md.from_lengths(t.detach().masked_fill(~there[..., None], 0.5), LENGTHS)).requires_grad_()
        for t in padded
    ]
    found, expected = FUNCTIONS[name](*given), FUNCTIONS[name](*steps)
    each = found.compressed() if found.ndim else found.to_tensor(torch.nan)
    torch.testing.assert_close(each.flatten(), expected.flatten(), rtol=1e-12, atol=1e-12)
    found.sum().backward()
    expected.sum().backward()
    for x, step in zip(given, steps, strict=True):
        assert (x.grad is None) == (step.grad is None)
        if x.grad is not None:
            torch.testing.assert_close(x.grad.compressed(), step.grad.flatten(), rtol=1e-12, atol=1e-12)


def test_adaptive_softmax_of_a_padded_batch() -> None:
    torch.manual_seed(0)
    layer = nn.AdaptiveLogSoftmaxWithLoss(3, 8, [3], div_value=1.0).double()
    x = md.from_lengths(torch.randn(4, 4, 3, dtype=torch.float64), LENGTHS)
    classes = md.from_lengths(torch.arange(16).view(4, 4) % 8, LENGTHS)
    output, loss = layer(flat(x), classes.flatten())
    expected, mean = layer(x.compressed().view(-1, 3), classes.compressed())
    torch.testing.assert_close(output.compressed(), expected)
    torch.testing.assert_close(loss.to_tensor(0), mean)
