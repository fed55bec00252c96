"""The extent of a tensor that somebody says is padded: what a boolean knows, read from its values once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from op_registry.errors import MaskedSemanticsError
from op_registry.extents.factors import (
    PREFIX,
    SAMPLES,
    SCATTERED,
    Along,
    Extent,
    Factor,
    Merged,
    Positions,
    conjunction,
    extent_of,
    narrowed,
)
from op_registry.records.dense import Dense
from op_registry.records.tracing import assert_when_run, may_be_read
from op_registry.records.validity import as_bool, as_int8, intersect


def prefix_along(record: Dense, dim: int) -> Dense:
    """A batch whose valid positions are the first ones of `dim`, in each index of dimension 0."""
    along = tuple(SAMPLES if d == 0 else PREFIX if d == dim else None for d in range(record.ndim))
    return Dense(record.data, record.validity, Extent((Factor(along),), is_mask=True))


def padded(record: Dense, extent: Tensor | None, dims: Sequence[int] | None) -> Dense:
    """The record with the extent that is given (None: its mask), whose positions are numbered by `dims` (None: by all
    dimensions but the first in which it varies).

    Where booleans of one dimension each say the same, the extent has a factor for each.
    """
    is_mask = extent is None
    if dims is None and not may_be_read(record.data):
        raise ValueError(
            f"padded: the values of a tensor of shape {tuple(record.shape)} cannot be read here, so that it is unknown "
            "along which dimensions its extent varies: name those that number positions, dim=1"
        )
    given = record.full_validity if extent is None else as_int8(extent)
    there = torch.ones([1] * record.ndim, dtype=torch.int8, device=record.device) if given is None else given
    there = there.expand(record.shape)
    found = [d for d in range(1, record.ndim) if _varies(there, d)] if dims is None else list(dims)
    if not found:
        found = [1] if dims is None else list(dims)
    others = [d for d in range(1, record.ndim) if d not in found]
    if any(_varies(there, d) for d in others):
        raise ValueError(
            f"the extent of shape {tuple(there.shape)} varies along dimensions {others}, which number no positions: "
            f"name all that do, dim={tuple(sorted({*found, *(d for d in others if _varies(there, d))}))}"
        )
    factors = [_factor(there, (d,), record.ndim) for d in found]
    joint = conjunction(factors)
    assert joint is not None
    if len(factors) > 1 and may_be_read(there) and not bool((joint == there).all()):
        factors = [_factor(there, tuple(found), record.ndim)]
    validity = record.validity if extent is None else intersect(record.validity, there)
    is_mask = is_mask or record.validity is None
    return Dense(record.data, validity, extent_of(factors, is_mask))


# Layouts that an exported program may state, as letters: what is known of each dimension of a factor.
_LETTERS: dict[str, Along] = {
    "-": None,
    "s": SAMPLES,
    "p": PREFIX,
    "c": Positions(contiguous=True, from_start=False),
    "f": Positions(contiguous=False, from_start=True),
    "g": SCATTERED,
}


def stated(extent: Extent) -> str:
    """What is known of an extent as text: a letter for each dimension, factor by factor.

    Raises MaskedSemanticsError for dimensions that are merged of others.
    """
    letters = {along: letter for letter, along in _LETTERS.items()}
    found: list[str] = []
    for along in (a for factor in extent.factors for a in factor.along):
        if isinstance(along, Merged):
            raise MaskedSemanticsError(
                "an example has a dimension that is merged of others, of which it knows which positions are there. "
                "Merge dimensions inside the module; or pass x.without_extent(), in which padding counts as missing"
            )
        found.append(letters[replace(along, parts=()) if isinstance(along, Positions) else along])
    ndim = len(found) // max(len(extent.factors), 1)
    return ",".join("".join(found[n : n + ndim]) for n in range(0, len(found), ndim or 1))


def as_stated(record: Dense, extent: Tensor | None, known: str) -> Dense:
    """The record with an extent, None: its mask, of which `known` holds; a graph asserts that it does."""
    given = record.full_validity if extent is None else as_int8(extent.expand(record.shape))
    if given is None:
        given = torch.ones([1] * record.ndim, dtype=torch.int8, device=record.device).expand(record.shape)
    factors = []
    for letters in known.split(","):
        there = as_bool(given)
        for dim, letter in enumerate(letters):
            there = there.any(dim, keepdim=True) if letter == "-" else there
        factors.append(Factor(tuple(_LETTERS[letter] for letter in letters), as_int8(there)))
    joint = conjunction(factors)
    assert joint is not None
    fits = [as_bool(joint).expand(record.shape) == as_bool(given)]
    fits += [_as_known(f, dim) for f in factors for dim in f.positions]
    for fit in fits:
        assert_when_run(
            fit,
            f"a batch is padded otherwise than the example of this program, whose dimensions are {known} (s: samples, "
            "p: positions from index 0 on, c: contiguous ones, -: neither). Pad it as the example is, or export again",
        )
    validity = record.validity if extent is None else intersect(record.validity, given)
    return Dense(record.data, validity, extent_of(factors, is_mask=extent is None))


def _as_known(factor: Factor, dim: int) -> Tensor:
    """Whether samples lie along `dim` as the factor knows."""
    along, there = factor.along[dim], factor.there
    assert there is not None
    assert isinstance(along, Positions)
    valid = as_bool(there)
    count = valid.cumsum(dim)
    total = valid.sum(dim, keepdim=True)
    if along.is_prefix:
        index = torch.ones_like(count).cumsum(dim)
        return valid == (index <= total)
    return valid == ((count > 0) & (valid.flip(dim).cumsum(dim).flip(dim) > 0)) if along.contiguous else valid == valid


def _varies(there: Tensor, dim: int) -> bool:
    if there.shape[dim] < 2 or not may_be_read(there) or there.stride(dim) == 0:
        return False
    return bool((there != there.narrow(dim, 0, 1)).any())


def _factor(there: Tensor, positions: Sequence[int], ndim: int) -> Factor:
    """A factor that depends on the first dimension and these."""
    gone = [d for d in range(1, ndim) if d not in positions]
    along: list[Along] = [SAMPLES if d == 0 else SCATTERED if d in positions else None for d in range(ndim)]
    if gone and there.numel():
        there = as_int8(there.amax(gone, keepdim=True))
    there = narrowed(there, along)
    if len(positions) == 1:
        along[positions[0]] = layout_of(there, positions[0])
    return Factor(tuple(along), there)


def layout_of(there: Tensor, dim: int) -> Positions:
    """Whether samples are contiguous along `dim`, and begin at 0; where values cannot be read, neither is known."""
    if not may_be_read(there):
        return SCATTERED
    size = there.shape[dim]
    valid = as_bool(there)
    index = torch.arange(size, device=there.device).reshape([-1 if d == dim else 1 for d in range(there.ndim)])
    count = valid.sum(dim, keepdim=True)
    if bool((valid == (index < count)).all()):
        return PREFIX
    last = torch.where(valid, index, -1).amax(dim, keepdim=True)
    first = torch.where(valid, index, size).amin(dim, keepdim=True)
    contiguous = bool(((last - first + 1 == count) | (count == 0)).all())
    return Positions(contiguous=contiguous, from_start=False)
