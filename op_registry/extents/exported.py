"""What an exported program says of the extent that it takes, and asserts when it runs."""

from __future__ import annotations

import torch
from torch import Tensor

from op_registry.errors import MaskedSemanticsError
from op_registry.extents.factors import where_all
from op_registry.records.dense import Dense
from op_registry.records.extent import LETTERS, Extent, Factor, Merged, Positions, extent_of, letters_of
from op_registry.records.tracing import assert_when_run
from op_registry.records.validity import as_bool, as_int8, intersect


def stated(extent: Extent) -> str:
    """What is known of an extent as text: a letter for each dimension, factor by factor.

    Raises MaskedSemanticsError for dimensions that are merged of others.
    """
    if any(isinstance(along, Merged) for factor in extent.factors for along in factor.along):
        raise MaskedSemanticsError(
            "an example has a dimension that is merged of others, of which it knows which positions are there. "
            "Merge dimensions inside the module; or pass x.without_extent(), in which padding counts as missing"
        )
    return ",".join(letters_of(factor.along) for factor in extent.factors)


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
        factors.append(Factor(tuple(LETTERS[letter] for letter in letters), as_int8(there)))
    fits = [as_bool(where_all(factors)).expand(record.shape) == as_bool(given)]
    fits += [fit for f in factors for dim in f.positions if (fit := _as_known(f, dim)) is not None]
    for fit in fits:
        assert_when_run(
            fit,
            f"a batch is padded otherwise than the example of this program, whose dimensions are {known} (s: samples, "
            "p: positions from index 0 on, c: contiguous ones, -: neither). Pad it as the example is, or export again",
        )
    validity = record.validity if extent is None else intersect(record.validity, given)
    return Dense(record.data, validity, extent_of(factors, is_mask=extent is None))


def _as_known(factor: Factor, dim: int) -> Tensor | None:
    """Whether samples lie along `dim` as the factor knows; None if it knows nothing of their order."""
    along, valid = factor.along[dim], as_bool(factor.there)
    assert isinstance(along, Positions)
    count = valid.cumsum(dim)
    total = valid.sum(dim, keepdim=True)
    if along.is_prefix:
        index = torch.ones_like(count).cumsum(dim)
        return valid == (index <= total)
    if along.contiguous:
        return valid == ((count > 0) & (valid.flip(dim).cumsum(dim).flip(dim) > 0))
    return None
