"""Padded batches to pack, views of them, and the comparison of what comes of them packed and padded."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import masked_dispatch as md

B, T, D, H = 5, 6, 4, 2


def rows(kind: str) -> Tensor:
    """Which rows of a batch (B, T) are valid."""
    lengths = torch.tensor([6, 0, 3, 1, 4])
    padded = torch.arange(T) < lengths[:, None]
    if kind == "padding":
        return padded
    if kind == "holes":
        return padded & (torch.rand(B, T, generator=torch.Generator().manual_seed(5)) < 0.6)
    return torch.full((B, T), kind == "all valid")


KINDS = ("padding", "holes", "all valid", "none valid")


def batch(kind: str, *sizes: int, seed: int = 0) -> md.MaskedTensor:
    """A padded batch (B, T, *sizes) with NaN where there is no row."""
    data = torch.randn((B, T, *sizes), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    mask = rows(kind).reshape(B, T, *[1] * len(sizes))
    return md.padded(md.masked_tensor(torch.where(mask, data, torch.nan), mask), dim=1)


def plain(*sizes: int, seed: int = 1) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def same(a: Tensor, b: Tensor) -> None:
    md.testing.assert_close(a, b, equal_nan=True)


def mask_of(x: Tensor) -> Tensor:
    return x.to_dense().get_mask() if md.is_masked_tensor(x) else torch.ones(x.shape, dtype=torch.bool)


def filled(x: Tensor) -> Tensor:
    return x.to_tensor(0) if md.is_masked_tensor(x) else x


def pack(x: Tensor) -> Tensor:
    """Packed rows, which are what is there only if the batch says so."""
    return x.to_packed() if x._extent is not None else x.to_packed().without_extent()


def alike(function: Callable[..., Any], inputs: list[Tensor], parameters: list[Tensor] = (), policy: str = "never"):
    """The function on padded inputs and on packed ones: the same result, and the same gradients of all inputs."""
    outcomes = []
    for packed in (False, True):
        leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in (*inputs, *parameters)]
        given = [pack(x) if packed and n < len(inputs) else x for n, x in enumerate(leaves)]
        torch.manual_seed(0)
        with md.densify(policy if packed else "auto"):
            results = function(*given)
            results = results if isinstance(results, (list, tuple)) else [results]
            wanted = [x for x in leaves if x.requires_grad]
            gradients: Any = []
            if any(r.requires_grad for r in results):
                total = sum((filled(r) * plain(*r.shape)).sum() for r in results if r.requires_grad)
                gradients = torch.autograd.grad(total, wanted, allow_unused=True)
        outcomes.append((results, gradients))
    (expected, expected_gradients), (found, gradients) = outcomes
    assert len(expected) == len(found)
    for a, b in zip(found, expected, strict=True):
        same(a, b)
    assert len(gradients) == len(expected_gradients)
    for a, b in zip(gradients, expected_gradients, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            same(a, b)
    return found


CLASSES = torch.arange(B * T).reshape(B, T) % D


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


class Block(nn.Module):
    """A pre-norm transformer block, as people write it."""

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._heads(part) for part in self.qkv(self.ln1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.proj(attended.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.ln2(x))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


# Views that merge the dimensions or turn them.
BH = B * H
MERGED: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x.view(-1, D),
    "time first": lambda x: x.transpose(0, 1),
    "rows, time first": lambda x: x.transpose(0, 1).reshape(-1, D),
    "batch times heads": lambda x: heads(x).reshape(BH, T, 2),
    "time, then batch times heads": lambda x: x.transpose(0, 1).reshape(T, BH, 2),
}


def random_view(x: Tensor, choose: random.Random) -> Callable[[Tensor], Tensor]:
    """A view that fits `x`, as a function."""
    kind = choose.choice(("permute", "merge", "split", "unsqueeze", "squeeze", "shape"))
    if kind == "permute" and x.ndim:
        order = choose.sample(range(x.ndim), x.ndim)
        return lambda t: t.permute(order)
    if kind == "merge" and x.ndim > 1:
        dim = choose.randrange(x.ndim - 1)
        return lambda t: t.flatten(dim, dim + 1)
    if kind == "split" and x.ndim:
        dim = choose.randrange(x.ndim)
        first = choose.choice([n for n in range(1, x.shape[dim] + 1) if x.shape[dim] % n == 0])
        return lambda t: t.unflatten(dim, (first, -1))
    if kind == "unsqueeze" and x.ndim < 6:
        dim = choose.randrange(x.ndim + 1)
        return lambda t: t.unsqueeze(dim)
    if kind == "squeeze":
        return lambda t: t.squeeze()
    shape = [choose.choice((1, 2, 3, B, T))]
    shape = shape if x.numel() % math.prod(shape) == 0 else [1]
    return lambda t: t.reshape(*shape, -1)


def check_random_views(seed: int, sizes: tuple[int, int]) -> None:
    """Stored densely where a view has no packed form; the values, masks and gradients are the same anyhow."""
    choose = random.Random(seed)
    x = batch("holes", H, 2).without_extent()[: sizes[0], : sizes[1]]
    twin, views = x.to_tensor(0), []
    for _ in range(7):
        views.append(random_view(twin, choose))
        twin = views[-1](twin)

    def run(t: Tensor) -> list[Tensor]:
        shown = [t.exp()]
        for view in views:
            shown.append(view(shown[-1]))
        return [*shown, shown[-1] * plain(*shown[-1].shape)]

    alike(run, [x], policy="auto")
