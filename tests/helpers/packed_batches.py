"""Padded batches to pack, and the comparison of what comes of them packed with what comes of them padded."""

from __future__ import annotations

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
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    assert torch.equal(mask_of(a), mask_of(b))
    torch.testing.assert_close(filled(a), filled(b), equal_nan=True)


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
