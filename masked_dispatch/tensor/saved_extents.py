"""Extents in files: whether what is valid is all that is there, what each factor knows of each dimension, its boolean.

These are plain values and tensors, so that ``torch.load(weights_only=True)`` needs no class of this library.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from masked_dispatch.tensor.file_format import own
from masked_dispatch.tensor.saved import check_saved, has_values, problem_of_validity
from op_registry.extents.factors import conjunction, factors_of
from op_registry.extents.found import contradiction
from op_registry.extents.pieces import in_plain_values, read
from op_registry.records.dense import Dense
from op_registry.records.extent import Extent, Factor
from op_registry.records.kept import without_kept
from op_registry.sparse.permuted import AnyRecord


def parts_of_extent(extent: Extent | None) -> tuple[tuple[Any, ...], ...]:
    """What a file holds of an extent, as the last argument of a builder; nothing for a tensor without one."""
    if extent is None or not extent.factors:  # (of which step a tensor is the state, a file does not say)
        return ()
    theres = (None if factor.said is None else without_kept(factor.there) for factor in extent.factors)
    return ((extent.is_mask, in_plain_values(extent, counts=True), *theres),)


def saved_extent(tensor: Tensor, parts: object, masked: type[Tensor]) -> Extent | None:
    """The extent of a tensor of any storage, from a file's parts. Raises ValueError if they do not fit the tensor."""
    if parts is None:
        return None
    is_mask, known, *theres = parts if isinstance(parts, tuple) and len(parts) > 1 else (None, None)
    if not isinstance(is_mask, bool) or not isinstance(known, tuple) or len(known) != len(theres):
        check_saved(f"its extent is its mask: {is_mask!r}, and of its {len(theres)} factors is known: {known!r}")
    factors = []
    for along, there in zip(known, theres, strict=True):
        if not isinstance(along, tuple) or len(along) != tensor.ndim:
            check_saved(f"its extent knows {along!r} of its {tensor.ndim} dimensions")
        try:
            factor = Factor(tuple(map(read, along)), there)
        except ValueError as problem:
            check_saved(str(problem))
        check_saved(_problem_of_factor(tensor, factor, is_mask and len(known) == 1, masked))
        factors.append(Factor(factor.along, own(there)))
    return Extent(tuple(factors), is_mask)


def _problem_of_factor(tensor: Tensor, factor: Factor, may_be_mask: bool, masked: type[Tensor]) -> str | None:
    if factor.said is None:
        return None if may_be_mask else "a factor of its extent is missing"
    there = factor.there
    problem = problem_of_validity(there, "data", tensor, masked, "extent")
    if problem is None and any(a is None and n != 1 for a, n in zip(factor.along, there.shape, strict=True)):
        return f"its extent has shape {tuple(there.shape)}, and does not depend on each of these dimensions"
    return problem


def check_extent(record: Dense) -> None:
    """Raise ValueError if an extent from a file contradicts itself or the mask."""
    if record.extent is not None:
        check_saved(problem_of_places(record) or problem_of_extent(record))


def problem_of_places(record: AnyRecord) -> str | None:
    """Find what a factor says otherwise than what it states of its dimensions."""
    if record.extent is None or 0 in record.shape:
        return None
    factors = [f for f in factors_of(record) if has_values(f.there)]
    return next((problem for f in factors if (problem := contradiction(f.along, f.there))), None)


def problem_of_extent(record: Dense) -> str | None:
    """Find what is valid and not there; where the mask is the extent, also what is there and not valid."""
    extent, there = record.extent, conjunction(factors_of(record))
    if extent is None or there is None or not has_values(there) or not record.data.numel():
        return None
    valid = torch.ones_like(there) if record.validity is None else record.validity
    if bool((valid > there).any()):
        return "an element is valid where its extent says that nothing is there"
    if extent.is_mask and bool((valid < there).any()):
        return "an element is invalid where its extent, which is its mask, says that something is there"
    return None
