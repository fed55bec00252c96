"""Extents in collectives: what the ranks state of them, and the booleans that travel with the masks.

A description holds, for each tensor that a rank sends, whether its mask is its extent and what each factor knows of
each dimension. Where the mask is the extent, nothing else travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from op_registry import MaskedSemanticsError
from op_registry.extents.factors import factors_of
from op_registry.extents.joins import extent_of_rows, extent_of_samples
from op_registry.extents.pieces import in_plain_values, read
from op_registry.extents.writes import known_of_union
from op_registry.records.dense import Dense
from op_registry.records.extent import Along, Extent, Factor, Merged, Positions, Samples, extent_of
from op_registry.sparse.permuted import AnyRecord

# Whether the mask is the extent, and what is known, in plain form; None for a tensor without an extent.
Statement = Sequence[Any] | None


def statement_of(record: AnyRecord) -> Statement:
    """What a description holds of a record's extent."""
    return None if record.extent is None else (record.extent.is_mask, in_plain_values(record.extent))


def statements_of(records: Sequence[AnyRecord]) -> tuple[Statement, ...]:
    """What a description holds of the extents of records; nothing if they have none."""
    statements = tuple(map(statement_of, records))
    return statements if any(statements) else ()


def compared(statement: Statement) -> Any:
    """What has to be equal on all ranks; a tensor that was reduced from samples has no factors, and may have holes."""
    return None if statement is None or not statement[1] else _as_lists(statement[1])


def compared_apart(statement: Statement) -> Any:
    """The same for tensors that stay apart, whose samples may lie at different places."""
    return None if statement is None or not statement[1] else [list(map(_kind, along)) for along in statement[1]]


def _kind(plain: Any) -> Any:
    """What a dimension numbers, from its plain form."""
    if plain is None or plain[0] == "samples":
        return plain and plain[0]
    return [plain[0], *([size, _kind(part)] for size, part in plain[-1])]


def problem_of_several(statements: Sequence[Statement]) -> str | None:
    """Say why what one rank sends to several cannot travel as one message; None if it can."""
    if all(compared(one) == compared(statements[0]) for one in statements):
        return None
    known = " and ".join(sorted(set(map(in_words, statements))))
    return (
        f"its tensors know differently which of their positions are there ({known}). Pass x.without_extent(), in which "
        "padding counts as missing."
    )


def statement_of_several(statements: Sequence[Statement]) -> Statement:
    """The statement of tensors that know the same."""
    known = [one for one in statements if one is not None]
    return (all(one[0] for one in known), known[0][1]) if len(known) == len(statements) else None


def _as_lists(plain: Any) -> Any:
    return [_as_lists(part) for part in plain] if isinstance(plain, (list, tuple)) else plain


@dataclass(frozen=True)
class Known:
    """What is known of the extent of a tensor that travels.

    known    what each factor knows of each dimension; None for a tensor without an extent
    is_mask  whether what is valid is there and nothing else is
    """

    known: tuple[tuple[Along, ...], ...] | None = None
    is_mask: bool = False

    @staticmethod
    def of(statement: Statement) -> Known:
        return (
            Known()
            if statement is None
            else Known(tuple(tuple(map(read, along)) for along in statement[1]), statement[0])
        )

    @staticmethod
    def of_all(everyone: Sequence[Statement]) -> Known:
        """What is known where all ranks know the same, except whether their masks are their extents."""
        padded = [statement[0] for statement in everyone if statement is not None]
        return Known(Known.of(everyone[0]).known, all(padded)) if len(padded) == len(everyone) else Known()

    @property
    def travels(self) -> bool:
        """Whether booleans travel beside the mask."""
        return bool(self.known) and not (self.is_mask and len(self.known or ()) == 1)

    def booleans(self, record: AnyRecord) -> list[Tensor]:
        """The booleans of a record that travel, one-dimensional int8."""
        if not self.travels:
            return []
        shapes = self.shapes(record.shape)
        if record.extent is None:  # of a rank that only receives
            return [torch.zeros(shape.numel(), dtype=torch.int8, device=record.device) for shape in shapes]
        return [
            f.there.to(torch.int8).expand(shape).reshape(-1)
            for f, shape in zip(factors_of(record), shapes, strict=True)
        ]

    def shapes(self, shape: Sequence[int]) -> list[torch.Size]:
        """The shapes of the booleans that travel with a tensor of this shape."""
        if not self.travels:
            return []
        return [torch.Size(1 if a is None else s for a, s in zip(f, shape, strict=True)) for f in self.known or ()]

    def extent(self, booleans: Sequence[Tensor]) -> Extent | None:
        """The extent of a tensor that has arrived with these booleans, of the shapes above."""
        if self.known is None:
            return None
        said: Sequence[Tensor | None] = booleans if self.travels else [None] * len(self.known)
        return extent_of([Factor(along, there) for along, there in zip(self.known, said, strict=True)], self.is_mask)

    def reduced(self, name: str) -> Known:
        """What is known of a reduction over ranks: a position is there where one rank's is."""
        if len(self.known or ()) > 1:
            raise MaskedSemanticsError(
                f"{name}: the tensors know by {len(self.known or ())} booleans which of their positions are there, and "
                "what one rank or another has is no such pair. Pass x.without_extent(), in which padding counts as "
                "missing."
            )
        return Known(None if self.known is None else tuple(map(known_of_union, self.known)), self.is_mask)


WITHOUT = Known()


def in_one(records: Sequence[Dense], shape: Sequence[int]) -> Extent | None:
    """The extent of records that become one of this shape: their rows one behind the other, or stacked."""
    if all(record.extent is None for record in records):
        return None
    name = "a collective into one tensor"
    if tuple(shape) == (len(records), *records[0].shape):
        return extent_of_samples(records, name)
    if tuple(shape) == (sum(record.shape[0] for record in records), *records[0].shape[1:]):
        return extent_of_rows(records, name)
    raise MaskedSemanticsError(
        f"{name}: parts of shape {tuple(records[0].shape)} know which of their positions are there, and a tensor of "
        f"shape {tuple(shape)} has neither their rows one behind the other nor them stacked. Give it one of these "
        "shapes, or pass x.without_extent(), in which padding counts as missing."
    )


# ---------------------------------------------------------------------------------------------------------- in words


def in_words(statement: Statement) -> str:
    """What a rank's tensor knows, for an error that compares ranks."""
    factors = Known.of(statement).known
    if not factors:
        return "without an extent"
    return "whose positions are there by " + " and by ".join(map(_factor_in_words, factors))


def _factor_in_words(along: Sequence[Along]) -> str:
    return ", ".join(f"{_along_in_words(known)} along {dim}" for dim, known in enumerate(along) if known is not None)


def _along_in_words(along: Along) -> str:
    if along is None:
        return "nothing"
    if isinstance(along, Samples):
        return "samples"
    sizes = " + " if isinstance(along, Positions) else " × "
    parts = sizes.join(f"{size} ({_along_in_words(part)})" for size, part in along.parts)
    if isinstance(along, Merged):
        return f"merged {parts}"
    kind = "first positions" if along.is_prefix else "positions in a row" if along.contiguous else "any positions"
    return f"{kind} of {parts}" if parts else kind
