"""The stored tensors of sparse storage, which a tensor and its detached copies share."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from op_registry.records.dense import Dense
from op_registry.records.extent import Extent
from op_registry.records.tracing import savable
from op_registry.sparse.record import Pattern


class Stored(NamedTuple):
    """A consistent state of the storage: values, int8 validity (None: all are valid) and pattern."""

    values: Tensor
    validity: Tensor | None
    pattern: Pattern


class StoredPieces:
    """The storage that a tensor shares with its detached copies, so that a write to one is visible in all.

    A write replaces `now` as a whole, so other tensors may hold the old state, and no reader sees parts of two writes.
    If `in_place`, other processes share the memory: a write then changes values and validity in place, and readers get
    copies. `extent_written` holds the extent of all these tensors, once a write has changed it.
    """

    __slots__ = ("__weakref__", "extent_written", "in_place", "now")

    def __init__(self, values: Tensor, validity: Tensor | None, pattern: Pattern) -> None:
        self.now = Stored(values, validity, pattern)
        self.in_place = False
        self.extent_written: tuple[Extent | None] | None = None

    @property
    def values(self) -> Tensor:
        return self.now.values

    @property
    def validity(self) -> Tensor | None:
        return self.now.validity

    @property
    def pattern(self) -> Pattern:
        return self.now.pattern

    def copied(self) -> Stored:
        """The present state, for a reader to keep."""
        values, validity, pattern = self.now
        if not self.in_place:
            return self.now
        return Stored(values.clone(), None if validity is None else validity.clone(), pattern)

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredPieces:
        values, validity, pattern = self.now
        pattern = pattern.with_pieces(tuple(piece.clone() for piece in pattern.pieces))
        return StoredPieces(values.clone(), None if validity is None else validity.clone(), pattern)

    def make_savable(self) -> None:
        """Replace pieces that autograd cannot save for backward; see :func:`op_registry.records.tracing.savable`."""
        values, validity, pattern = self.now
        stored = pattern.pieces if validity is None else (validity, *pattern.pieces)
        if not any(map(Tensor.is_inference, stored)):
            return
        pieces = tuple(savable(piece) for piece in pattern.pieces)
        changed = any(new is not old for new, old in zip(pieces, pattern.pieces, strict=True))
        savable_validity = None if validity is None else savable(validity)
        if changed or savable_validity is not validity:
            self.now = Stored(values, savable_validity, pattern.with_pieces(pieces) if changed else pattern)

    def share_with_processes(self) -> None:
        """Move everything, with a full validity, to shared memory; from now on, writes change it in place."""
        if not self.in_place:
            values = self.values.clone()  # other tensors may hold the present values
            full = Dense(values, self.validity).full_validity
            ones = torch.ones_like(values, dtype=torch.int8)
            self.now = Stored(values, ones if full is None else ones & full, self.pattern)
            self.in_place = True
        for piece in (self.values, self.validity, *self.pattern.pieces):
            assert piece is not None
            piece.share_memory_()

    def write_in_place(self, found: Dense) -> None:
        """Overwrite values and validity in place; an element becomes valid only after the write of its value."""
        assert self.validity is not None
        validity = found.full_validity
        if validity is not None:
            self.validity.mul_(validity)
        self.values.copy_(found.data.expand(self.values.shape))
        self.validity.copy_(torch.ones_like(self.validity) if validity is None else validity)
