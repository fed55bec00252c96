"""Masks laid over a sample, and what is put under them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# A tensor that stays plain, among others that are masked.
PLAIN = "plain"

WHOLE = ("unstored", "stored")
PARTIAL = ("half", "half_first", "half_others", "slices", "empty", "first", "broadcast")
KINDS = (*WHOLE, *PARTIAL)

# Those of them in which every tensor has a random mask of its own.
RANDOM = ("half", "half_others")
ATTEMPTS = 16

# What is put under the mask: by name, for floating point; integers take the nearest thing that they have.
FILLS = ("nan", "inf", "-inf", "max", "lowest", "tiny")

DESCRIPTIONS = {
    "unstored": "every tensor masked, no validity stored: all valid",
    "stored": "every tensor masked, a stored mask that is all True",
    "half": "every tensor under a random mask of its own; where two have a shape, each hides what the other does not",
    "half_first": "the first tensor under a random mask, the others plain",
    "half_others": "the first tensor plain, the others under random masks",
    "slices": "the first slice of the first and of the last dimension invalid",
    "empty": "nothing valid",
    "first": "only the first element valid",
    "broadcast": "a random mask with every other dimension of size 1",
}


@dataclass(frozen=True)
class Masking:
    """A mask (bool, broadcastable to the tensor; None where all is valid) or PLAIN for each tensor of a sample."""

    kind: str
    masks: tuple[Any, ...]

    def full(self, tensors: Sequence[Tensor]) -> list[Tensor | None]:
        """Each mask at its tensor's full shape; None for a tensor that stays plain."""
        found: list[Tensor | None] = []
        for tensor, mask in zip(tensors, self.masks, strict=True):
            if isinstance(mask, str):
                found.append(None)
            elif mask is None:
                found.append(torch.ones(tensor.shape, dtype=torch.bool))
            else:
                found.append(mask.expand(tensor.shape).clone())
        return found


def _random(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Half valid; with two elements or more at least one valid and one not."""
    mask = torch.rand(tuple(shape), generator=generator) < 0.5
    if mask.numel() > 1 and (mask.all() or not mask.any()):
        flat = mask.reshape(-1)
        flat[int(torch.randint(len(flat), (), generator=generator))] ^= True
    return mask


def _mask(kind: str, tensor: Tensor, generator: torch.Generator) -> Tensor | None:
    shape = tensor.shape
    if kind == "unstored":
        return None
    if kind == "stored":
        return torch.ones(shape, dtype=torch.bool)
    if kind == "empty":
        return torch.zeros(shape, dtype=torch.bool)
    if kind == "first":
        mask = torch.zeros(shape, dtype=torch.bool)
        if mask.numel():
            mask.reshape(-1)[0] = True
        return mask
    if kind == "slices":
        mask = torch.ones(shape, dtype=torch.bool)
        if mask.ndim and mask.numel():
            mask[0] = False
            mask[..., 0] = False
        return mask
    if kind == "broadcast":
        return _random([1 if d % 2 else s for d, s in enumerate(reversed(shape))][::-1], generator)
    return _random(shape, generator)


def masking(kind: str, tensors: Sequence[Tensor], seed: int = 0) -> Masking | None:
    """The masks of `kind` for these tensors; None where the kind has nothing to say about them."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{kind} {seed}".encode()))
    if kind == "half_others" and len(tensors) < 2:
        return None
    if kind == "half_first" and len(tensors) < 2:
        return None
    masks: list[Any] = []
    for position, tensor in enumerate(tensors):
        if (kind == "half_first" and position) or (kind == "half_others" and not position):
            masks.append(PLAIN)
        else:
            masks.append(_mask(kind, tensor, generator))
    if kind in RANDOM:
        again = torch.Generator().manual_seed(zlib.crc32(f"{kind} {seed} again".encode()))
        for position in range(len(masks)):
            masks[position] = _told_apart(masks, position, again)
    return Masking(kind, tuple(masks))


def _told_apart(masks: Sequence[Any], position: int, generator: torch.Generator) -> Any:
    """A random mask, or another one in its place: of two masks of one shape something is to be valid in both, and in
    either alone. Where one lies within the other, a rule that forgets that other one is right by chance."""
    mask = masks[position]
    alike = [n for n, m in enumerate(masks) if isinstance(mask, Tensor) and m is not PLAIN and m.shape == mask.shape]
    if len(alike) < 2:
        return mask
    before = [masks[n] for n in alike if n < position]
    for drawn in (mask, *(_random(mask.shape, generator) for _ in range(ATTEMPTS))):
        if int(drawn.sum()) > 1 and all(bool(p.any()) for m in before for p in (drawn & m, drawn & ~m, ~drawn & m)):
            return drawn
    return mask  # of one element or two there is no such pair


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def refilled(tensor: Tensor, mask: Tensor | None, fill: str) -> Tensor:
    """A copy of `tensor` with garbage wherever `mask` (of full shape) is False."""
    copy = tensor.detach().clone()
    if mask is None or bool(mask.all()):
        return copy
    if copy.dtype in _SIGNED:  # torch cannot write single elements of these
        return refilled(copy.view(_SIGNED[copy.dtype]), mask, fill).view(copy.dtype)
    if copy.dtype is torch.bool:
        garbage = torch.as_tensor(fill in ("nan", "inf", "max")).expand(copy.shape)
    elif copy.dtype.is_floating_point or copy.dtype.is_complex:
        real = torch.finfo(copy.dtype)
        value = {
            "nan": float("nan"),
            "inf": float("inf"),
            "-inf": float("-inf"),
            "max": real.max,
            "lowest": real.min,
            "tiny": real.smallest_normal / 4,
        }[fill]
        garbage = torch.full((), value, dtype=copy.real.dtype if copy.dtype.is_complex else copy.dtype)
        garbage = (
            torch.complex(garbage, garbage) if copy.dtype.is_complex and copy.dtype is not torch.complex32 else garbage
        )
        garbage = garbage.to(copy.dtype).expand(copy.shape)
    else:
        whole = torch.iinfo(copy.dtype)
        value = {"nan": whole.min, "inf": whole.max, "-inf": 0, "max": whole.max, "lowest": whole.min, "tiny": 1}[fill]
        garbage = torch.full((), value, dtype=copy.dtype).expand(copy.shape)
    return (
        torch.where(mask, copy, garbage).as_strided(copy.shape, copy.stride())
        if not copy.ndim
        else _placed(copy, mask, garbage)
    )


def _placed(copy: Tensor, mask: Tensor, garbage: Tensor) -> Tensor:
    """Written in place, so that the copy keeps its strides."""
    copy[~mask] = garbage[~mask]
    return copy
