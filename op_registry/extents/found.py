"""The extent of a tensor that somebody says is padded: what a boolean knows, read from its values once.

Of a packed batch, of a record in another layout, and of an exported program's example, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from op_registry.errors import MaskedSemanticsError
from op_registry.extents.factors import (
    any_along,
    confined,
    conjunction,
    factors_of,
    narrowed,
    packed,
    validity_over,
    where_all,
    with_extent,
)
from op_registry.extents.follow import is_all_valid
from op_registry.records.dense import Dense
from op_registry.records.extent import (
    LETTERS,
    SAMPLES,
    SCATTERED,
    Along,
    Extent,
    Factor,
    Merged,
    Positions,
    extent_of,
    letters_of,
)
from op_registry.records.tracing import assert_when_run, computed_at_once, may_be_read, recording
from op_registry.records.validity import as_bool, as_int8, intersect
from op_registry.sparse.convert import from_dense, to_layout
from op_registry.sparse.layout import Block, Layout
from op_registry.sparse.permuted import AnyRecord, keeps_dims_in_view, shown
from op_registry.sparse.record import Sparse


def padded(record: AnyRecord, extent: Tensor | None, dims: Sequence[int] | None, samples: int = 0) -> Any:
    """The record with the extent that is given (None: its mask), whose samples are numbered by a dimension, and their
    positions by `dims` (None: by all others in which it varies).

    Where booleans of one dimension each say the same, the extent has a factor for each.
    """
    if dims is None and isinstance(record, Dense) and not may_be_read(record.data):
        raise ValueError(
            f"padded: the values of a tensor of shape {tuple(record.shape)} cannot be read here, so that it is unknown "
            "along which dimensions its extent varies: name those that number positions, dim=1"
        )
    given = _validity(record) if extent is None else as_int8(extent)
    there = torch.ones([1] * record.ndim, dtype=torch.int8, device=record.device) if given is None else given
    there = there.expand(record.shape)
    rest = [d for d in range(record.ndim) if d != samples]
    found = [d for d in rest if _varies(there, d)] if dims is None else list(dims)
    if not found:
        found = rest[:1] if dims is None else list(dims)
    others = [d for d in rest if d not in found]
    if any(_varies(there, d) for d in others):
        raise ValueError(
            f"the extent of shape {tuple(there.shape)} varies along dimensions {others}, which number no positions: "
            f"name all that do, dim={tuple(sorted({*found, *(d for d in others if _varies(there, d))}))}"
        )
    factors = [_factor(there, (d,), samples) for d in found]
    if len(factors) > 1 and may_be_read(there) and not bool((where_all(factors) == there).all()):
        factors = [_factor(there, tuple(found), samples)]
    is_mask = extent is None or is_all_valid(record)
    return with_extent(record if extent is None else confined(record, there), extent_of(factors, is_mask))


def _validity(record: AnyRecord) -> Tensor | None:
    """int8 that broadcasts to the record: where it is valid. Small for a packed batch of whole rows, see below."""
    if isinstance(record, Dense):
        return record.full_validity
    base, groups = shown(record)
    whole = base.values.validity is None
    inner = [dim for dim, group in enumerate(groups) if whole and all(d >= base.pattern.ndim for d in group)]
    return validity_over(record, inner)().expand(record.shape)


def stores_whole_rows(record: AnyRecord) -> bool:
    """Whether a record is a packed batch, all of whose rows are valid as wholes."""
    if isinstance(record, Dense):
        return False
    base, _ = shown(record)
    return keeps_dims_in_view(base.pattern) and base.values.validity is None


def padded_along(record: AnyRecord, there: Tensor, known: str) -> Any:
    """The record, whose positions are there only where a boolean says so; what was not there before still is not.

    there  has as many dimensions as the record, of size 1 where it does not depend on one
    known  a letter for each dimension, see LETTERS, or "?": the layout of the samples is read from the boolean
    """
    there = as_int8(there)
    along = tuple(
        layout_of(there, dim) if letter == "?" else with_count(LETTERS[letter], there, dim)
        for dim, letter in enumerate(known)
    )
    return there_too(record, Factor(along, there))


def there_too(record: AnyRecord, factor: Factor) -> Any:
    """The record, whose positions are there only where a factor has them, too."""
    before = record.extent
    is_mask = is_all_valid(record) if before is None else before.is_mask
    return with_extent(confined(record, factor.there), extent_of([*factors_of(record), factor], is_mask))


def of_packed(record: Sparse) -> Sparse:
    """A packed batch, whose rows are what is there.

    The boolean is the pattern of rows itself where all of a row is valid. (Rows without elements are not stored.)
    """
    if 0 in record.dense_sizes:
        return record
    rows = validity_over(Sparse(Dense(record.values.data), record.pattern), list(range(2, record.ndim)))()
    along: tuple[Along, ...] = (SAMPLES, layout_of(rows, 1), *(None for _ in record.dense_sizes))
    return Sparse(record.values, record.pattern, extent_of([Factor(along, rows)], record.values.validity is None))


def _varies(there: Tensor, dim: int) -> bool:
    if there.shape[dim] < 2 or not may_be_read(there) or there.stride(dim) == 0:
        return False
    return bool((there != there.narrow(dim, 0, 1)).any())


def _factor(there: Tensor, positions: Sequence[int], samples: int) -> Factor:
    """A factor that depends on the dimension of samples and these."""
    dims = range(there.ndim)
    gone = [d for d in dims if d != samples and d not in positions]
    along: list[Along] = [SAMPLES if d == samples else SCATTERED if d in positions else None for d in dims]
    there = narrowed(any_along(there, gone), along)
    if len(positions) == 1:
        along[positions[0]] = layout_of(there, positions[0])
    return Factor(tuple(along), there)


def layout_of(there: Tensor, dim: int) -> Positions:
    """Whether samples are contiguous along `dim`, and begin at 0; where values cannot be read, neither is known."""
    if not may_be_read(there):
        return with_count(SCATTERED, there, dim)
    count, begin, follow = _order(there, dim)
    contiguous, nonempty = bool(follow.all()), bool((count > 0).all())
    return Positions(contiguous, contiguous and bool(begin.all()), nonempty=nonempty)


def _order(there: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each sample: how many positions it has along `dim`, whether they begin at index 0, and follow one another."""
    valid = as_bool(there)
    rank, count = valid.cumsum(dim), valid.sum(dim, keepdim=True)
    before = (rank == 0).sum(dim, keepdim=True)
    behind = ((rank == count) & ~valid).sum(dim, keepdim=True)
    has_none = count == 0
    return count, has_none | (before == 0), has_none | (there.shape[dim] - before - behind == count)


def with_count(along: Along, there: Tensor, dim: int) -> Any:
    """What is known of a dimension, and whether every sample has a position there: asked once for a batch."""
    if not isinstance(along, Positions) or along.nonempty or not computed_at_once(there) or recording():
        return along
    return replace(along, nonempty=bool(there.any(dim).all()))


def contradiction(along: Sequence[Along], there: Tensor) -> str | None:
    """What a boolean says otherwise than what is stated of its dimensions; None if they agree."""
    for dim, known in enumerate(along):
        parts = getattr(known, "parts", ())
        sizes = [size for size, _ in parts]
        whole = math.prod(sizes) if isinstance(known, Merged) else sum(sizes)
        if parts and whole != there.shape[dim]:
            return f"dimension {dim} has {there.shape[dim]} indices, and it states parts of {sizes}"
        if isinstance(known, Merged):
            return contradiction((*along[:dim], *[a for _, a in parts], *along[dim + 1 :]), there.unflatten(dim, sizes))
        found = _of_positions(known, there, dim) if isinstance(known, Positions) and there.numel() else None
        for (_, part), piece in zip(parts, there.split(sizes, dim) if parts else (), strict=True):
            found = found or contradiction((*along[:dim], part, *along[dim + 1 :]), piece)
        if found:
            return found
    return None


def _of_positions(known: Positions, there: Tensor, dim: int) -> str | None:
    count, begin, follow = _order(there, dim)
    if known.from_start and not bool(begin.all()):
        return f"it states that samples begin at index 0 of dimension {dim}, and one of its extent does not"
    if known.contiguous and not bool(follow.all()):
        return f"it states that positions follow one another along dimension {dim}, and those of its extent do not"
    if known.nonempty and not bool(count.all()):
        return f"it states that every sample has a position along dimension {dim}, and one of its extent has none"
    return None


# -------------------------------------------------------------------------------------------------------- other layouts


def in_layout(record: Dense | Sparse, layout: Layout, dims: int | None, block: Block | None) -> Sparse:
    """The record in a layout, with its extent, which is carried beside what is stored.

    Packed storage stores the positions that are there: a row that is there and missing is stored, and invalid.
    """
    extent = record.extent
    if extent is None:
        found = _converted(record, layout, dims, block)
        return of_packed(found) if layout.of_sequences else found
    there = None if extent.is_mask or not layout.of_sequences else conjunction(factors_of(record))
    is_so = isinstance(record, Sparse) and record.pattern.layout == layout
    if there is None or is_so:
        found = _converted(record, layout, dims, block)
    else:
        found = packed(record, there, layout)
    result: Sparse = with_extent(found, extent)
    return result


def _converted(record: Dense | Sparse, layout: Layout, dims: int | None, block: Block | None) -> Sparse:
    return from_dense(record, layout, dims, block) if isinstance(record, Dense) else to_layout(record, layout, block)


# ---------------------------------------------------------------------------------------------------- exported programs


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
    for factor in factors:
        for dim, along in enumerate(factor.along):
            if isinstance(along, Positions) and along.contiguous:
                _, begin, follow = _order(factor.there, dim)
                fits.append(begin & follow if along.from_start else follow)
    for fit in fits:
        assert_when_run(
            fit,
            f"a batch is padded otherwise than the example of this program, whose dimensions are {known} (s: samples, "
            "p: positions from index 0 on, c: contiguous ones, -: neither). Pad it as the example is, or export again",
        )
    validity = record.validity if extent is None else intersect(record.validity, given)
    return Dense(record.data, validity, extent_of(factors, is_mask=extent is None))
