"""Padded batches, functions of one batch or of one of its samples, and the loop over samples that is compared with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

import masked_dispatch as md
from padded_batches import Of, step_of_batch, step_of_loop

LENGTHS = [4, 2, 0, 3]


def batch(*features: int, side: str = "right", lengths: list[int] = LENGTHS) -> tuple[md.MaskedTensor, list[Tensor]]:
    """A batch (B, T, *features) with NaN as padding, and its samples (1, n, *features)."""
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randn(1, n, *features, generator=generator, dtype=torch.float64) for n in lengths]
    width = max(lengths) + 1
    data = torch.full((len(lengths), width, *features), torch.nan, dtype=torch.float64)
    there = torch.zeros(len(lengths), width, *[1] * len(features), dtype=torch.bool)
    for row, sample in enumerate(samples):
        start = 0 if side == "right" else width - lengths[row]
        data[row, start : start + lengths[row]] = sample
        there[row, start : start + lengths[row]] = True
    return md.padded(md.masked_tensor(data, there), dim=1), samples


def check_loop(f: Callable[[Tensor], Tensor], x: md.MaskedTensor, samples: list[Tensor]) -> None:
    """`f` of the batch is `f` of each sample that has positions, in values, masks and gradients of the samples."""
    result = f(x)
    extent = torch.ones(result.shape, dtype=torch.bool) if result.extent is None else result.extent
    assert not (result.get_mask() & ~extent).any()
    rows, module = [row for row, sample in enumerate(samples) if sample.shape[1]], Of(lambda of, x: f(x))
    alone = step_of_loop(module, [[samples[row] for row in rows]])
    assert step_of_batch(module, [x], rows).difference(alone) < 1e-11


W = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
KERNEL = torch.randn(2, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def with_mean_joined(x: Tensor) -> Tensor:
    return F.linear(torch.cat([x, x.mean(1, keepdim=True).expand_as(x)], -1), W).softmax(1)


def pairs(x: Tensor) -> Tensor:
    n = x.shape[1]
    both = torch.cat([x[:, :, None].expand(-1, -1, n, -1), x[:, None].expand(-1, n, -1, -1)], -1)
    return F.linear(both, W).sum(2)


def convolved(*arguments: int) -> Callable[[Tensor], Tensor]:
    return lambda x: F.conv1d(x.transpose(1, 2), KERNEL, None, *arguments)


RIGHT_OR_LEFT: dict[str, Callable[[Tensor], Tensor]] = {
    "features joined": with_mean_joined,
    "pairs": pairs,
    "zeros joined": lambda x: torch.cat([x, x.new_zeros(1).expand(x.shape[0], x.shape[1], 1)], -1),
    "chomp": lambda x: convolved(1, 2)(x)[..., :-2],
    "conv after pad": lambda x: F.conv1d(F.pad(x.transpose(1, 2), (1, 1)), KERNEL),
    "transposed, trimmed": lambda x: F.conv_transpose1d(x.transpose(1, 2), KERNEL, stride=2)[..., 1:-1],
    "conv, stride 2": convolved(2, 1),
    "max_pool": lambda x: F.max_pool1d(x.transpose(1, 2), 2, 1),
    "upsampled": lambda x: F.interpolate(x.transpose(1, 2), scale_factor=2.0, mode="linear"),
    "differences": lambda x: x[:, 1:] - x[:, :-1],
    "flip": lambda x: x + x.flip(1),
    "roll": lambda x: x - x.roll(1, 1),
    "merged and split": lambda x: F.linear(x.reshape(-1, 2), W[:, :2]).view(x.shape[0], x.shape[1], 3),
    "heads": lambda x: x.unflatten(2, (2, 1)).transpose(1, 2).flatten(0, 1).softmax(1).unflatten(0, (-1, 2)).sum(1),
    "attention": lambda x: (x @ x.transpose(1, 2)).softmax(-1) @ x,
    "steps stacked": lambda x: torch.stack([F.linear(x[:, t], W[:, :2]).tanh() for t in range(x.shape[1])], 1),
    "sorted": lambda x: x.sort(1)[0],
    "normalised": lambda x: F.layer_norm(x, (2,)) * x.var(1, keepdim=True, correction=0),
    "unfolded": lambda x: x.unfold(1, 2, 1).sum(-1),
}
