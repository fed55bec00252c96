"""The tensors of programs under P9: samples of different sizes, and the padded batch of them.

A source has `axes`: "B" for the samples, a letter for a dimension in which samples differ, a number for features.
Sources with one letter have one length in each sample. All that is random follows from the program's seed.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

from op_registry.conformance.subject import Subject
from op_registry.fuzz.programs import Source
from op_registry.fuzz.sources import data_of

SIDES = ("right", "right", "left", "centre")
GARBAGE = (float("nan"), float("inf"), 1e38)


def side_of(source: Source, seed: int) -> str:
    """Where the padding of a batch lies: in half of the programs, all batches have one side."""
    rng = random.Random(f"side {seed}")
    side, own = rng.choice(SIDES), rng.random() < 0.5
    return random.Random(f"side {seed} {source.seed}").choice(SIDES) if own else side


def lengths(source: Source, seed: int) -> list[tuple[int, ...]]:
    """The sizes of each sample; in half of the programs, some have length 0.

    (Of a sample without positions along one of two dimensions, no boolean tells how many it has along the other: none.)
    """
    columns = []
    for axis, most in zip(source.axes[1:], source.shape[1:], strict=True):
        rng = random.Random(f"{axis} {seed}")
        counts = isinstance(axis, str)
        columns.append([rng.randint(seed % 2, most) if counts else most for _ in range(source.shape[0])])
    found = zip(*columns, strict=True) if columns else [()] * source.shape[0]
    letters = [isinstance(axis, str) for axis in source.axes[1:]]
    return [
        tuple(0 if letter and 0 in sizes else size for letter, size in zip(letters, sizes, strict=True))
        for sizes in found
    ]


Place = tuple[slice, ...]


def places(source: Source, seed: int) -> list[Place]:
    """Where each sample lies in the batch."""
    side = side_of(source, seed)
    found = []
    for sizes in lengths(source, seed):
        place = []
        for length, size in zip(sizes, source.shape[1:], strict=True):
            start = {"right": 0, "left": size - length, "centre": (size - length) // 2}[side]
            place.append(slice(start, start + length))
        found.append(tuple(place))
    return found


def samples(source: Source, seed: int) -> list[tuple[Tensor, Tensor | None]]:
    """Each sample (1, …) by itself, and its mask; None if nothing is missing."""
    data = data_of(source)
    mask = None
    if source.mask == "random":
        generator = torch.Generator().manual_seed(source.seed + 1)
        mask = torch.rand(source.shape, generator=generator) < 0.8
        if source.shape[-1] > 1:  # whole positions, too
            mask &= torch.rand((*source.shape[:-1], 1), generator=generator) < 0.9
    return [
        (data[(slice(row, row + 1), *place)].clone(), None if mask is None else mask[(slice(row, row + 1), *place)])
        for row, place in enumerate(places(source, seed))
    ]


def sample(source: Source, row: int, seed: int, subject: Subject, requires_grad: bool = False) -> object:
    """A sample of a source by itself: plain, or masked where it misses values; a source without samples as it is."""
    if not source.axes:
        return data_of(source).requires_grad_(requires_grad)
    data, mask = samples(source, seed)[row]
    return data.requires_grad_(requires_grad) if mask is None else subject.wrap(data, mask, requires_grad=requires_grad)


def there(source: Source, seed: int) -> Tensor:
    """bool of the batch's shape: which positions are there."""
    found = torch.zeros(source.shape, dtype=torch.bool)
    for row, place in enumerate(places(source, seed)):
        found[row][place] = True
    return found


def batch(source: Source, seed: int, subject: Subject, requires_grad: bool = False, own: bool = False) -> object:
    """The samples of a source as a padded batch, with garbage around them; a source without samples as it is.

    own  whether the extent is a tensor of its own also where nothing is missing; else it is the mask there
    """
    if not source.axes:
        return data_of(source).requires_grad_(requires_grad)
    exists = there(source, seed)
    data = torch.where(exists, data_of(source), GARBAGE[source.seed % len(GARBAGE)])
    mask = None
    if source.mask == "random":
        mask = torch.zeros(source.shape, dtype=torch.bool)
        for (_, missing), row, place in zip(
            samples(source, seed), range(source.shape[0]), places(source, seed), strict=True
        ):
            assert missing is not None
            mask[row][place] = missing[0]
    positions = [d for d, axis in enumerate(source.axes) if d and isinstance(axis, str)]
    if not positions:
        return subject.wrap(data, mask, requires_grad=requires_grad)
    if own and mask is None:
        mask = exists.clone()
    return subject.padded(data, mask, exists, 0, positions, requires_grad)
