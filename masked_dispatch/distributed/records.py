"""What collectives mean for dense records: `reduced` combines the valid contributions, `moved` keeps them as they are.

Both start their messages and return a function that waits for the result.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from masked_dispatch.distributed.fields import pack, packed_size, present, unpack, width_for
from masked_dispatch.distributed.transport import Awaited
from masked_dispatch.torch_internals import share_memory
from op_registry.records.dense import Dense
from op_registry.records.dims import Number
from op_registry.records.dtypes import accumulation_dtype, highest, lowest
from op_registry.records.fill import fill_in_place
from op_registry.records.zeros import known_zero

# A reduction on the wire, (data, "sum") → function that waits.
Send = Callable[[Tensor, str], Awaited]
Reduced = Callable[[], Dense]

# Elements of a message, where what is reduced in place is sent in several.
PIECE = 1 << 21
REDUCTIONS = ("sum", "avg", "min", "max", "product")


def problem_of_reduction(op: str, dtype: torch.dtype) -> str | None:
    """Why a reduction has no meaning for partly valid contributions; None if it has one."""
    if op not in REDUCTIONS:
        return (
            f"the reduction {op.upper()} has no masked meaning. SUM, AVG, MIN, MAX and PRODUCT combine the valid "
            "contributions; for another one choose the values of invalid elements first, x.to_tensor(value)."
        )
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        return f"the mean of {dtype} is no integer: convert first, x.to(torch.float32), or use SUM and x.count()."
    return None


def identity_of(op: str, dtype: torch.dtype) -> Number:
    """What an invalid element contributes: nothing."""
    if op in ("sum", "avg"):
        return 0
    return 1 if op == "product" else highest(dtype) if op == "min" else lowest(dtype)


class Masks(enum.Enum):
    """What is known of the masks of all ranks before they are sent."""

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
) -> Reduced:
    """The reduction of records of one shape, one after the other; the result has that shape.

    known    of the masks: where there is none, none results; one that all ranks have is that of the result
    narrow   whether fields of the masks may be narrower than a byte
    overwritten  whether the result replaces the records, so that their memory may be used
    """
    record = records[0]
    if overwritten and record.data.is_contiguous():
        values = reduced_in_place(record, op, send)
    else:
        values = reduced_copies(records, op, send)
    if known is not Masks.ANY:
        return lambda: Dense(values(ranks), record.validity if known is Masks.EQUAL else None)

    width, combined = of_masks(op, ranks, narrow)
    with torch.no_grad():
        masks = [pack(validity_of(r), width) for r in records]
        counted = send(masks[0] if len(masks) == 1 else torch.cat(masks), combined)

    def finish() -> Dense:
        fields, elements = counted(), record.data.numel()
        divisor = unpack(fields, width, elements).clamp(min=1) if op == "avg" else 1
        validity = present(fields, width, elements).view(record.shape)
        return Dense(values(divisor), validity)

    return finish


def reduced_copies(records: Sequence[Dense], op: str, send: Send) -> Callable[[int | Tensor], Tensor]:
    """Start to reduce what the records add. To wait takes what a mean is divided by: one number, or each element's."""
    contributions = [contribution(record, op) for record in records]
    total = send(contributions[0] if len(records) == 1 else torch.cat(contributions), on_wire(op, records[0].dtype))

    return lambda divisor: result_of(total(), op, divisor, records[0].dtype).view(records[0].shape)


def reduced_in_place(record: Dense, op: str, send: Send) -> Callable[[int | Tensor], Tensor]:
    """The same in the memory of the record, which is contiguous.

    What has another dtype on the wire travels in pieces: one is on its way while the next is converted, and none is so
    large that its memory would be new to the process each time.
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
    """Bits of a field of the masks, and their reduction: a sum, which counts the valid contributions.

    Where a byte cannot count the ranks, only a mean has to know the number; others send bytes, and take the largest.
    """
    width = width_for(ranks) if narrow else max(8, width_for(ranks))
    return (8, "max") if width > 8 and op != "avg" else (width, "sum")


def identity_in_place(record: Dense, op: str) -> Tensor:
    """The record's data with what contributes nothing where it is invalid; often a gradient, which is known to be 0."""
    identity = identity_of(op, record.dtype)
    if identity == 0 and known_zero(record.data, record.validity):
        return record.data
    return fill_in_place(record.data, record.validity, identity)


def contribution(record: Dense, op: str) -> Tensor:
    """What a record adds to a reduction, one-dimensional, in memory that nothing else uses."""
    dtype = record.dtype
    filled = record.filled(identity_of(op, dtype)).reshape(-1).to(wire_dtype(op, dtype))
    shares = share_memory(filled, record.data)
    return filled.clone(memory_format=torch.contiguous_format) if shares else filled.contiguous()


def wire_dtype(op: str, dtype: torch.dtype) -> torch.dtype:
    """Sums of half precision travel as float32 and are rounded once; bool as bytes."""
    if dtype is torch.bool:
        return torch.uint8
    return accumulation_dtype(dtype) if op in ("sum", "avg", "product") else dtype


def on_wire(op: str, dtype: torch.dtype) -> str:
    """A mean is a sum that is divided at its end; there is no sum of bools."""
    if dtype is torch.bool:
        return {"sum": "max", "product": "min"}.get(op, op)
    return "sum" if op == "avg" else op


def result_of(total: Tensor, op: str, divisor: int | Tensor, dtype: torch.dtype) -> Tensor:
    return (total / divisor if op == "avg" else total).to(dtype)


def validity_of(record: Dense) -> Tensor:
    """One-dimensional int8 validity, whether or not the record stores one."""
    validity = record.full_validity
    if validity is None:
        return torch.ones(record.data.numel(), dtype=torch.int8, device=record.device)
    return validity.to(torch.int8).reshape(-1)


class Moved:
    """Records that arrive as one message of data, and one of masks if something is invalid."""

    def __init__(self, data: Awaited, masks: Awaited | None, width: int = 1) -> None:
        self.data, self.masks, self.width = data, masks, width

    def split(self, shapes: Sequence[torch.Size]) -> list[Dense]:
        """Wait, and take the messages apart into records of these shapes."""
        sizes = [shape.numel() for shape in shapes]
        parts = self.data()[: sum(sizes)].split(sizes)
        if self.masks is None:
            return [Dense(part.view(shape), None) for part, shape in zip(parts, shapes, strict=True)]
        masks = self.masks()
        lengths = [packed_size(n, self.width) for n in sizes]
        fields = masks[: sum(lengths)].split(lengths)
        validities = [unpack(f, self.width, n).view(torch.int8) for f, n in zip(fields, sizes, strict=True)]
        return [
            Dense(part.view(shape), validity.view(shape))
            for part, validity, shape in zip(parts, validities, shapes, strict=True)
        ]


def moved(records: Sequence[Dense], partial: bool, send: Callable[[Tensor], Awaited], width: int = 1) -> Moved:
    """Send records one after the other, their masks after them."""
    data = send(joined([record.data.reshape(-1) for record in records]))
    return Moved(data, send(joined_masks(records, width)) if partial else None, width)


def exchanged(
    records: Sequence[Dense],
    received: Sequence[int],
    sent: Sequence[int],
    partial: bool,
    send: Callable[[Tensor, Sequence[int], Sequence[int]], Awaited],
    width: int = 1,
) -> Moved:
    """Send a record to each rank, and receive one; `received` and `sent` are numbers of elements."""
    data = send(joined([record.data.reshape(-1) for record in records]), received, sent)
    if not partial:
        return Moved(data, None, width)
    fields = [[packed_size(n, width) for n in numbers] for numbers in (received, sent)]
    return Moved(data, send(joined_masks(records, width), *fields), width)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """One after the other, contiguous."""
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(list(parts))


def joined_masks(records: Sequence[Dense], width: int = 1) -> Tensor:
    with torch.no_grad():
        return joined([pack(validity_of(record), width) for record in records])
