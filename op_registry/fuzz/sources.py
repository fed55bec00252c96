"""The tensors of a random program: valid data, masks, and the garbage under the masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from op_registry.conformance.masks import FILLS, refilled
from op_registry.conformance.subject import Subject
from op_registry.fuzz.programs import Source

# The kinds of masks. "plain" stays a plain tensor; "unstored" is masked, with every element valid.
MASKS = {
    "plain": "a plain tensor",
    "unstored": "masked, all valid, no validity stored",
    "all": "a stored mask that is all True",
    "random": "a random mask",
    "rare": "a random mask with one element in eight valid",
    "rows": "a mask of size 1 in all dimensions but the first",
    "columns": "a mask of size 1 in all dimensions but the last",
    "lengths": "the first few elements of each row",
    "empty": "nothing valid",
    "permuted": "a random mask whose strides are in reverse order",
}


def data_of(source: Source) -> Tensor:
    """The valid data of a source: small numbers with ties and zeros, and sometimes an infinity or a NaN."""
    generator = torch.Generator().manual_seed(source.seed)
    dtype = getattr(torch, source.dtype)
    if dtype is torch.bool:
        return torch.rand(source.shape, generator=generator) < 0.5
    if not dtype.is_floating_point and not dtype.is_complex:
        # Indices into any dimension of two or more elements.
        return torch.randint(0, 2, source.shape, generator=generator).to(dtype)
    data = torch.randn(source.shape, generator=generator)
    if source.seed % 3 == 0:
        data = (data * 2).round() / 2
    if source.seed % 10 == 0 and data.numel():
        data.view(-1)[-1] = float("nan") if source.seed % 20 else float("inf")
    return data.to(dtype, copy=True)  # at version 0, which errors name


def mask_of(source: Source) -> Tensor | None:
    """The mask with which to wrap the source; None if it has no stored mask, or stays plain."""
    generator = torch.Generator().manual_seed(source.seed + 1)
    shape, dims = source.shape, len(source.shape)
    if source.mask in ("plain", "unstored"):
        return None
    if source.mask in ("all", "empty"):
        return torch.full(shape, source.mask == "all")
    if source.mask == "lengths" and dims >= 2:
        lengths = torch.randint(0, shape[1] + 1, shape[:1], generator=generator)
        mask = torch.arange(shape[1]) < lengths[:, None]
        return mask.reshape(*mask.shape, *[1] * (dims - 2))
    if source.mask == "rows" and dims:
        return torch.rand((shape[0], *[1] * (dims - 1)), generator=generator) < 0.6
    if source.mask == "columns" and dims:
        return torch.rand((*[1] * (dims - 1), shape[-1]), generator=generator) < 0.6
    if source.mask == "permuted" and dims >= 2:
        mask = torch.rand(tuple(reversed(shape)), generator=generator) < 0.6
        return mask.permute(*reversed(range(dims)))
    return torch.rand(shape, generator=generator) < (0.125 if source.mask == "rare" else 0.6)


def with_garbage(data: Tensor, mask: Tensor | None, seed: int) -> Tensor:
    """A copy of `data` with garbage wherever `mask` is False: of one kind for odd seeds, mixed for even ones."""
    if mask is None:
        return data.clone()
    full = mask.expand(data.shape)
    if seed % 2:
        return refilled(data, full, FILLS[seed // 2 % len(FILLS)])
    kind = torch.randint(len(FILLS), data.shape, generator=torch.Generator().manual_seed(seed))
    for number, fill in enumerate(FILLS):
        data = refilled(data, full | (kind != number), fill)
    return data


def wrapped(
    sources: Sequence[Source], subject: Subject, garbage: int | None, data: Mapping[str, Tensor] | None = None
) -> dict[str, object]:
    """The sources as values of the subject, with the data as they are (or `data`) or with garbage under the masks."""
    values: dict[str, object] = {}
    masks: dict[str, Tensor | None] = {}
    for source in sources:
        numbers = data_of(source) if data is None else data[source.name].clone()
        mask = mask_under(source, masks)
        masks[source.name] = mask
        if garbage is not None:
            numbers = with_garbage(numbers, mask, source.seed + garbage)
        if source.mask == "plain":
            values[source.name] = numbers.requires_grad_(source.requires_grad)
            continue
        value = subject.wrap(numbers, mask, requires_grad=source.requires_grad)
        if source.storage != "dense":
            value = subject.stored(value, source.storage, source.requires_grad, explicit_invalid=True)
        values[source.name] = value
    return values


def mask_under(source: Source, masks: dict[str, Tensor | None]) -> Tensor | None:
    """The source's mask; if it shares another source's mask, the same tensor."""
    if source.mask == "plain" or source.under not in masks:
        return mask_of(source)
    return masks[source.under]


def plain(sources: Sequence[Source]) -> dict[str, object]:
    """The sources as plain tensors, every element valid."""
    return {source.name: data_of(source).requires_grad_(source.requires_grad) for source in sources}
