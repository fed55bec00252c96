"""The samples on which storages are compared: those with a tensor that can be stored sparsely.

Torch's samples of unary operators are 1-d, empty, or a single number. A few of them are folded to two and three
dimensions, so that every layout is tested with every operator. So are the samples of operators whose 2-d samples all
have a zero derivative (hardtanh between two close numbers).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from op_registry.conformance import plain_torch
from op_registry.conformance.sample import Sample, chosen

# Folded samples are numbered from here, above the numbers of the database's samples.
FOLDED = 10_000
# How many 1-d samples are folded.
MOST = 3
# How many samples are differentiated to find one with a nonzero derivative.
SLOPES = 8


def storable(samples: Sequence[Sample]) -> list[Sample]:
    """Samples with a tensor of two or more dimensions; with folded ones too if none of these has a nonzero derivative.

    Without any such samples: the folded ones, or if nothing can be folded, all samples.
    """
    multidimensional = [s for s in samples if any(t.ndim >= 2 and t.numel() > 1 for t in s.tensors)]
    if not multidimensional:
        return list(_folded(samples)) or list(samples)
    if any(map(_sloped, chosen(multidimensional, SLOPES))):
        return multidimensional
    return [*multidimensional, *filter(_sloped, _folded(samples))]


def _sloped(sample: Sample) -> bool:
    """Whether plain torch's derivative is nonzero."""
    return plain_torch.derivative(sample).sloped


def _folded(samples: Sequence[Sample]) -> Iterator[Sample]:
    number = FOLDED
    seen: set[tuple[Any, ...]] = set()
    for sample in samples:
        shapes = {tuple(t.shape) for t in sample.tensors if t.ndim}
        if len(shapes) != 1 or sample.shape_of_call() in seen or len(seen) == MOST:
            continue
        (shape,) = shapes
        if len(shape) != 1 or not _factors(shape[0], 2):
            continue
        seen.add(sample.shape_of_call())
        for dims in (2, 3):
            sizes = _factors(shape[0], dims)
            number += 1
            if not sizes:
                continue
            args, kwargs = sample.with_tensors(lambda t, sizes=sizes: _reshaped(t, sizes))  # type: ignore[misc]
            folded = dataclasses.replace(sample, args=args, kwargs=kwargs, number=number)
            if plain_torch.forward(folded).error is None:
                yield folded


def _reshaped(t: Tensor, sizes: Sequence[int]) -> Tensor:
    return t.reshape(*sizes) if t.ndim else t


def _factors(size: int, dims: int) -> tuple[int, ...] | None:
    """`size` as a product of `dims` factors greater than 1, small ones first."""
    if dims == 1:
        return (size,) if size > 1 else None
    for factor in range(2, size):
        if size % factor == 0:
            rest = _factors(size // factor, dims - 1)
            if rest:
                return (factor, *rest)
    return None
