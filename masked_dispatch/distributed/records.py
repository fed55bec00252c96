"""What collectives mean for dense records: `reduced` combines the valid contributions, `moved` keeps them as they are.

Both start their messages and return a function that waits for the result.
"""

from __future__ import annotations

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

# A reduction on the wire, (data, "sum") → function that waits.
Send = Callable[[Tensor, str], Awaited]
Reduced = Callable[[], Dense]

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


def reduced(
    records: Sequence[Dense],
    op: str,
    ranks: int,
    partial: bool,
    send: Send,
    narrow: bool = True,
    overwritten: bool = False,
) -> Reduced:
    """The reduction of records of one shape, one after the other; the result has that shape.

    partial  whether any rank has invalid elements: if none has, no mask travels and none results
    narrow   whether fields of the masks may be narrower than a byte
    overwritten  whether the result replaces the records, so that their memory may be used
    """
    record = records[0]
    overwritten = overwritten and record.data.is_contiguous()
    result = result_in_place if overwritten else result_of
    contributions = [contribution(r, op, overwritten) for r in records]
    data = contributions[0] if len(records) == 1 else torch.cat(contributions)
    total = send(data, "sum" if op == "avg" else on_wire(op, record.dtype))
    if not partial:
        return lambda: Dense(result(total(), op, ranks, record), None)
    width, combined = of_masks(op, ranks, narrow)
    with torch.no_grad():
        masks = [pack(validity_of(r), width) for r in records]
        counted = send(masks[0] if len(masks) == 1 else torch.cat(masks), combined)

    def finish() -> Dense:
        fields, elements = counted(), record.data.numel()
        validity = present(fields, width, elements).view(record.shape)
        divisor = unpack(fields, width, elements).view(record.shape).clamp(min=1) if op == "avg" else 1
        return Dense(result(total(), op, divisor, record), validity)

    return finish


def of_masks(op: str, ranks: int, narrow: bool = True) -> tuple[int, str]:
    """Bits of a field of the masks, and their reduction: a sum, which counts the valid contributions.

    Where a byte cannot count the ranks, only a mean has to know the number; others send bytes, and take the largest.
    """
    width = width_for(ranks) if narrow else max(8, width_for(ranks))
    return (8, "max") if width > 8 and op != "avg" else (width, "sum")


def contribution(record: Dense, op: str, overwritten: bool = False) -> Tensor:
    """What a record adds to a reduction, one-dimensional, in memory that nothing else uses, or in its own."""
    dtype = record.dtype
    if overwritten:
        return fill_in_place(record.data, record.validity, identity_of(op, dtype)).view(-1).to(wire_dtype(op, dtype))
    filled = record.filled(identity_of(op, dtype)).reshape(-1).to(wire_dtype(op, dtype))
    shares = share_memory(filled, record.data)
    return filled.clone(memory_format=torch.contiguous_format) if shares else filled.contiguous()


def wire_dtype(op: str, dtype: torch.dtype) -> torch.dtype:
    """Sums of half precision travel as float32 and are rounded once; bool as bytes."""
    if dtype is torch.bool:
        return torch.uint8
    return accumulation_dtype(dtype) if op in ("sum", "avg", "product") else dtype


def on_wire(op: str, dtype: torch.dtype) -> str:
    if dtype is torch.bool:
        return {"sum": "max", "product": "min"}.get(op, op)
    return op


def result_of(total: Tensor, op: str, divisor: int | Tensor, like: Dense) -> Tensor:
    total = total.view(like.shape)
    return (total / divisor if op == "avg" else total).to(like.dtype)


def result_in_place(total: Tensor, op: str, divisor: int | Tensor, like: Dense) -> Tensor:
    """The same in the memory of `like`, of which `total` may be a view."""
    total = total.view(like.shape)
    if op == "avg":
        torch.div(total, divisor, out=total)
    return total if share_memory(total, like.data) else like.data.copy_(total)


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
