"""Dense records in messages: their masks, and `reduced`, which combines the valid contributions of all ranks.

It starts its messages and returns a function that waits for the result.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from masked_dispatch.distributed.extents import WITHOUT, Known
from masked_dispatch.distributed.extents import in_one as extent_in_one
from masked_dispatch.distributed.messages import Awaited, pack, packed_size, present, unpack, width_for
from masked_dispatch.torch_internals import share_memory
from op_registry.records.arguments import Number, accumulation_dtype, highest, lowest
from op_registry.records.dense import Dense
from op_registry.records.fill import fill_in_place, known_zero

# A transport's reduction: it takes (data, "sum") and returns a function that waits.
Send = Callable[[Tensor, str], Awaited]
Reduced = Callable[[], Dense]

# An in-place reduction sends messages of this many elements.
PIECE = 1 << 21
REDUCTIONS = ("sum", "avg", "min", "max", "product")


def problem_of_reduction(op: str, dtype: torch.dtype) -> str | None:
    """Say why a reduction is undefined for partly valid contributions; None if it is defined."""
    if op not in REDUCTIONS:
        return (
            f"the reduction {op.upper()} has no masked meaning. SUM, AVG, MIN, MAX and PRODUCT combine the valid "
            "contributions; for another one choose the values of invalid elements first, x.to_tensor(value)."
        )
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        return f"the mean of {dtype} is not an integer: convert first, x.to(torch.float32), or use SUM and x.count()."
    return None


def identity_of(op: str, dtype: torch.dtype) -> Number:
    """Return the identity of the reduction, which stands in for invalid elements."""
    if op in ("sum", "avg"):
        return 0
    return 1 if op == "product" else highest(dtype) if op == "min" else lowest(dtype)


class Masks(enum.Enum):
    """What the ranks know about all masks before they send any."""

    NONE = "nothing is invalid"
    EQUAL = "each rank has the same"
    ANY = "each rank has one of its own"


def reduced(
    records: Sequence[Dense],
    op: str,
    ranks: int,
    known: Masks,
    send: Send,
    narrow: bool = True,
    overwritten: bool = False,
    extent: Known = WITHOUT,
) -> Reduced:
    """Reduce records of one shape over the ranks; the result has that shape.

    known    with NONE, the result has no mask; with EQUAL, it has the mask that all ranks share
    narrow   whether fields of the masks may be narrower than a byte
    overwritten  whether the result replaces the records, so that the reduction may use their memory
    extent   what all ranks know of the extents; a position of the result is there where one rank's is
    """
    record, united = records[0], extent.reduced(f"a reduction {op.upper()} over ranks")
    if overwritten and record.data.is_contiguous():
        values = reduced_in_place(record, op, send)
    else:
        values = reduced_copies(records, op, send)
    if known is not Masks.ANY and not extent.travels:
        validity = record.validity if known is Masks.EQUAL else None
        return lambda: Dense(values(ranks), validity, united.extent([]))

    width, combined = of_masks(op, ranks, narrow)
    with torch.no_grad():
        counted = send(joined_masks(records, width, [extent] * len(records)), combined)

    def finish() -> Dense:
        shapes = [record.shape, *extent.shapes(record.shape)]
        fields, *booleans = parts_of(counted(), width, shapes)
        divisor = unpack(fields, width, record.data.numel()).clamp(min=1) if op == "avg" else 1
        there = [
            present(part, width, shape.numel()).view(shape) for part, shape in zip(booleans, shapes[1:], strict=True)
        ]
        validity = present(fields, width, record.data.numel()).view(record.shape)
        return Dense(values(divisor), validity, united.extent(there))

    return finish


def reduced_copies(records: Sequence[Dense], op: str, send: Send) -> Callable[[int | Tensor], Tensor]:
    """Start to reduce copies of the records. The returned function takes the divisor of a mean: a number or tensor."""
    contributions = [contribution(record, op) for record in records]
    total = send(contributions[0] if len(records) == 1 else torch.cat(contributions), on_wire(op, records[0].dtype))

    return lambda divisor: result_of(total(), op, divisor, records[0].dtype).view(records[0].shape)


def reduced_in_place(record: Dense, op: str, send: Send) -> Callable[[int | Tensor], Tensor]:
    """Start to reduce in the memory of the record, which is contiguous.

    If messages need another dtype, the record travels in pieces: one piece is in flight while the next is converted.
    Pieces are small enough that the allocator reuses memory instead of mapping new pages each time.
    """
    dtype = record.dtype
    filled = identity_in_place(record, op).view(-1)
    pieces = filled.split(PIECE)
    totals = [send(piece.to(wire_dtype(op, dtype)), on_wire(op, dtype)) for piece in pieces]

    def finish(divisor: int | Tensor) -> Tensor:
        for piece, divisors, total in zip(pieces, per_piece(divisor, pieces), totals, strict=True):
            values = total()
            if op == "avg":
                torch.div(values, divisors, out=values)
            if not share_memory(values, piece):
                piece.copy_(values)
        return filled.view(record.shape)

    return finish


def per_piece(divisor: int | Tensor, pieces: Sequence[Tensor]) -> Sequence[int | Tensor]:
    return divisor.split(PIECE) if isinstance(divisor, Tensor) else [divisor] * len(pieces)


def of_masks(op: str, ranks: int, narrow: bool = True) -> tuple[int, str]:
    """Return the bits of a mask field and the reduction of the fields: a sum, which counts the valid contributions.

    If a byte cannot count the ranks, only a mean needs the exact number; other reductions send bytes and take the max.
    """
    width = width_for(ranks) if narrow else max(8, width_for(ranks))
    return (8, "max") if width > 8 and op != "avg" else (width, "sum")


def identity_in_place(record: Dense, op: str) -> Tensor:
    """Overwrite the invalid elements with the identity, unless both are 0 (as in most gradients); return the data."""
    identity = identity_of(op, record.dtype)
    if identity == 0 and known_zero(record.data, record.validity):
        return record.data
    return fill_in_place(record.data, record.validity, identity)


def contribution(record: Dense, op: str) -> Tensor:
    """Return a record's one-dimensional contribution to a reduction, in memory of its own."""
    dtype = record.dtype
    filled = record.filled(identity_of(op, dtype)).reshape(-1).to(wire_dtype(op, dtype))
    shares = share_memory(filled, record.data)
    return filled.clone(memory_format=torch.contiguous_format) if shares else filled.contiguous()


def wire_dtype(op: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of messages: float32 for sums of half precision, which are rounded once; bytes for bool."""
    if dtype is torch.bool:
        return torch.uint8
    return accumulation_dtype(dtype) if op in ("sum", "avg", "product") else dtype


def on_wire(op: str, dtype: torch.dtype) -> str:
    """Return the reduction that the backend runs: a sum for a mean, which is divided afterwards; no sum for bool."""
    if dtype is torch.bool:
        return {"sum": "max", "product": "min"}.get(op, op)
    return "sum" if op == "avg" else op


def result_of(total: Tensor, op: str, divisor: int | Tensor, dtype: torch.dtype) -> Tensor:
    return (total / divisor if op == "avg" else total).to(dtype)


def validity_of(record: Dense) -> Tensor:
    """Return the one-dimensional int8 validity, even if the record stores none."""
    validity = record.full_validity
    if validity is None:
        return torch.ones(record.data.numel(), dtype=torch.int8, device=record.device)
    return validity.to(torch.int8).reshape(-1)


def parts_of(fields: Tensor, width: int, shapes: Sequence[torch.Size]) -> tuple[Tensor, ...]:
    """Split a message of masks into the fields of booleans of these shapes."""
    lengths = [packed_size(shape.numel(), width) for shape in shapes]
    return fields[: sum(lengths)].split(lengths)


def size_of_masks(shape: torch.Size, width: int, known: Known) -> int:
    """Return the length of the message of a record's mask, and of the booleans that travel with it."""
    return sum(packed_size(boolean.numel(), width) for boolean in (shape, *known.shapes(shape)))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the parts into one contiguous tensor."""
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(list(parts))


def joined_masks(records: Sequence[Dense], width: int = 1, known: Sequence[Known] | None = None) -> Tensor:
    """Pack the masks of records into one message; each is followed by the booleans of its extent that travel."""
    known = [WITHOUT] * len(records) if known is None else known
    with torch.no_grad():
        booleans = [b for r, k in zip(records, known, strict=True) for b in (validity_of(r), *k.booleans(r))]
        return joined([pack(boolean, width) for boolean in booleans])


def in_one(records: Sequence[Dense], shape: Sequence[int]) -> Dense:
    """Concatenate the elements of records into one record of this shape."""
    data = joined([record.data.reshape(-1) for record in records])
    validities = [record.validity.reshape(-1) for record in records if record.validity is not None]
    extent = extent_in_one(records, shape)
    return Dense(data.view(shape), joined(validities).view(shape) if validities else None, extent)
