"""Masks for the tensors of a sample, and the garbage stored under them."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from op_registry.records.arguments import SIGNED

# Stands in place of the mask of a tensor that stays plain.
PLAIN = "plain"
Mask = Tensor | str | None

# The kinds of masks, each with its description, under which every element is valid.
_WHOLE = {
    "unstored": "every tensor masked, no validity stored: all valid",
    "stored": "every tensor masked, a stored mask that is all True",
}
# The kinds under which something is invalid.
_PARTIAL = {
    "half": "every tensor under a random mask of its own; no mask contains that of another tensor of the same shape",
    "half_first": "the first tensor under a random mask, the others plain",
    "half_others": "the first tensor plain, the others under random masks",
    "half_values": "one element of the first tensor invalid, others of its dtype under random masks, indices plain",
    "slices": "the first slice of the first and of the last dimension invalid",
    "empty": "nothing valid",
    "first": "only the first element valid",
    "broadcast": "a random mask with every other dimension of size 1",
    "rows": "the first tensor under a random mask with a last dimension of size 1, the others plain",
    "shared": "tensors of one shape under one random mask, as one object; those of other shapes under their own",
    "itself": "one tensor in place of all that can be it, as in f(x, x), under a random mask",
}
# Kinds for calls made for them (variations.py).
SHARED, ITSELF = "shared", "itself"
# A kind for operators of whole slices, which have no valid result under most others.
ONE_HOLE = "one_hole"
DESCRIPTIONS = _WHOLE | _PARTIAL | {ONE_HOLE: "one element of each tensor invalid"}
WHOLE, PARTIAL, KINDS = tuple(_WHOLE), (*_PARTIAL, ONE_HOLE), tuple(DESCRIPTIONS)

# The kinds for storages other than dense.
STORED = ("half", "half_first", "half_others", "half_values", "slices", "empty", "shared", "itself", ONE_HOLE)

# The kinds under which every masked tensor has a random mask of its own.
RANDOM = ("half", "half_others", ITSELF)
ATTEMPTS = 16

# The garbage stored under a mask. The names are those of floating-point values; integers use the nearest they have.
FILLS = ("nan", "inf", "-inf", "max", "lowest", "tiny")
# Not garbage, but a number on which torch's own formulas branch: "zero". For "known zero" we also tell the subject,
# which may remember it.
ZERO, KNOWN_ZERO = "zero", "known zero"


@dataclass(frozen=True)
class Masking:
    """A mask (bool, broadcastable to the tensor; None where all is valid) or PLAIN for each tensor of a sample.

    Where two tensors have one mask object, so have those of the subject.
    """

    kind: str
    masks: tuple[Mask, ...]

    def full(self, tensors: Sequence[Tensor]) -> list[Tensor | None]:
        """Each mask at its tensor's full shape; None for a tensor that stays plain."""
        full_masks: list[Tensor | None] = []
        for tensor, mask in zip(tensors, self.masks, strict=True):
            if isinstance(mask, str):
                full_masks.append(None)
            elif mask is None:
                full_masks.append(torch.ones(tensor.shape, dtype=torch.bool))
            else:
                full_masks.append(mask.expand(tensor.shape).clone())
        return full_masks


def _random(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """A random mask, about half True; with two or more elements at least one is True and one False."""
    mask = torch.rand(tuple(shape), generator=generator) < 0.5
    if mask.numel() > 1 and (mask.all() or not mask.any()):
        flat = mask.reshape(-1)
        flat[int(torch.randint(len(flat), (), generator=generator))] ^= True
    return mask


def _mask(kind: str, tensor: Tensor, generator: torch.Generator) -> Tensor | None:
    shape = tensor.shape
    if kind == "unstored":
        return None
    if kind == "broadcast":
        return _random([1 if d % 2 else s for d, s in enumerate(reversed(shape))][::-1], generator)
    if kind == "rows":
        return _random([*shape[:-1], 1] if shape else [], generator)
    if kind not in ("stored", "empty", "first", "slices", ONE_HOLE):
        return _random(shape, generator)
    mask = torch.full(shape, kind not in ("empty", "first"))
    if kind == "first":
        mask.reshape(-1)[:1] = True
    elif kind == ONE_HOLE and mask.numel():
        mask.reshape(-1)[int(torch.randint(mask.numel(), (), generator=generator))] = False
    elif kind == "slices" and mask.ndim and mask.numel():
        mask[0] = False
        mask[..., 0] = False
    return mask


def masking(kind: str, tensors: Sequence[Tensor], seed: int = 0) -> Masking | None:
    """The masks of `kind` for these tensors; None if the kind does not fit them."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{kind} {seed}".encode()))
    if kind in ("half_first", "half_others") and len(tensors) < 2:
        return None
    like_first = [t.dtype is tensors[0].dtype for t in tensors] if tensors else []
    if kind == "half_values" and (sum(like_first) < 2 or all(like_first)):
        return None  # "half_first" or "half" is this
    if kind == SHARED:
        return _one_for_each_shape(tensors, generator)
    masks: list[Mask] = []
    for position, tensor in enumerate(tensors):
        leaves_plain = {
            "half_first": position > 0,
            "rows": position > 0,
            "half_others": position == 0,
            "half_values": not like_first[position],
        }
        if leaves_plain.get(kind, False):
            masks.append(PLAIN)
        else:
            # The target is nearly all valid, so that an invalid value overwrites a valid one.
            of_this = ONE_HOLE if kind == "half_values" and not position else kind
            masks.append(_mask(of_this, tensor, generator))
    if kind in RANDOM:
        redraws = torch.Generator().manual_seed(zlib.crc32(f"{kind} {seed} again".encode()))
        for position in range(len(masks)):
            masks[position] = _distinguishable(masks, position, redraws)
    return Masking(kind, tuple(masks))


def _one_for_each_shape(tensors: Sequence[Tensor], generator: torch.Generator) -> Masking | None:
    """One random mask for each shape; None if no two tensors share one that has valid and invalid elements."""
    of_shape = {tensor.shape: _random(tensor.shape, generator) for tensor in tensors}
    if not any(shape.numel() > 1 for shape, count in Counter(t.shape for t in tensors).items() if count > 1):
        return None
    return Masking(SHARED, tuple(of_shape[tensor.shape] for tensor in tensors))


def _distinguishable(masks: Sequence[Mask], position: int, generator: torch.Generator) -> Mask:
    """The mask at `position`, redrawn if necessary: two masks of one shape overlap, and neither contains the other.

    If one contained the other, a rule that forgets it would be right by chance.
    """
    mask = masks[position]
    if not isinstance(mask, Tensor):
        return mask
    of_its_shape = [(n, m) for n, m in enumerate(masks) if isinstance(m, Tensor) and m.shape == mask.shape]
    if len(of_its_shape) < 2:
        return mask
    earlier = [m for n, m in of_its_shape if n < position]
    for drawn in (mask, *(_random(mask.shape, generator) for _ in range(ATTEMPTS))):
        if int(drawn.sum()) > 1 and all(bool(p.any()) for m in earlier for p in (drawn & m, drawn & ~m, ~drawn & m)):
            return drawn
    return mask  # impossible for tensors of one or two elements


def refilled(tensor: Tensor, mask: Tensor | None, fill: str) -> Tensor:
    """A copy of `tensor` with garbage (one of FILLS) or zeros wherever `mask`, of full shape, is False."""
    copy = tensor.detach().clone()
    if mask is None or bool(mask.all()):
        return copy
    if copy.dtype in SIGNED:  # torch cannot write single elements of these
        return refilled(copy.view(SIGNED[copy.dtype]), mask, fill).view(copy.dtype)
    if copy.dtype is torch.bool:
        number: float = fill in ("nan", "inf", "max")
    elif copy.dtype.is_floating_point or copy.dtype.is_complex:
        real = torch.finfo(copy.dtype)
        numbers = {"max": real.max, "lowest": real.min, "tiny": real.smallest_normal / 4, ZERO: 0.0, KNOWN_ZERO: 0.0}
        number = numbers[fill] if fill in numbers else float(fill)
    else:
        whole = torch.iinfo(copy.dtype)
        extremes = {"nan": whole.min, "inf": whole.max, "max": whole.max, "lowest": whole.min, "tiny": 1}
        number = extremes.get(fill, 0)
    garbage = torch.full((), number, dtype=copy.real.dtype if copy.dtype.is_complex else copy.dtype)
    if copy.dtype.is_complex and copy.dtype is not torch.complex32:
        garbage = torch.complex(garbage, garbage)
    garbage = garbage.to(copy.dtype).expand(copy.shape)
    return copy.copy_(torch.where(mask, copy, garbage))  # in place, so that the copy keeps its strides
