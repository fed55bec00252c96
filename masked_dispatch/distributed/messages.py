"""What travels between ranks: plain tensors, by torch.distributed's functions or its functional operators,
and validity as bits.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup, ReduceOp

from op_registry.older_torch import all_gather_single, reduce_scatter_single
from op_registry.records.fill import OwnFunction
from op_registry.records.validity import kept_with

Awaited = Callable[[], Tensor]
T = TypeVar("T")


def awaited(work: Any, result: Tensor) -> Awaited:
    def wait() -> Tensor:
        if work is not None:
            work.wait()
        return result

    return wait


def settle(outcome: Future[T], function: Callable[[], T]) -> None:
    """Call a function, and let a future have what it returns or raises."""
    try:
        outcome.set_result(function())
    except Exception as error:
        outcome.set_exception(error)


class Eager:
    """Call torch.distributed's public functions asynchronously; reductions overwrite their operand."""

    width = 1  # the bits of a field for one boolean

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.ranks = group.size()

    def all_reduce(self, data: Tensor, op: str) -> Awaited:
        return awaited(distributed.all_reduce(data, _op(op), group=self.group, async_op=True), data)

    def reduce(self, data: Tensor, op: str, root: int) -> Awaited:
        work = distributed.reduce(data, op=_op(op), group=self.group, group_dst=root, async_op=True)
        return awaited(work, data)

    def reduce_scatter(self, data: Tensor, op: str) -> Awaited:
        out = data.new_empty(len(data) // self.ranks)
        return awaited(reduce_scatter_single()(out, data, op=_op(op), group=self.group, async_op=True), out)

    def all_gather(self, data: Tensor) -> Awaited:
        out = data.new_empty(self.ranks * len(data))
        work = all_gather_single()(in_bytes(out), in_bytes(data), group=self.group, async_op=True)
        return awaited(work, out)

    def broadcast(self, data: Tensor, root: int) -> Awaited:
        work = distributed.broadcast(in_bytes(data), group=self.group, group_src=root, async_op=True)
        return awaited(work, data)

    def gather(self, data: Tensor, root: int) -> Awaited:
        out = data.new_empty(self.ranks, len(data) if self.group.rank() == root else 0)
        parts = list(in_bytes(out)) if self.group.rank() == root else None
        work = distributed.gather(in_bytes(data), parts, group=self.group, group_dst=root, async_op=True)
        return awaited(work, out.flatten())

    def scatter(self, data: Tensor, root: int) -> Awaited:
        """Scatter the root's `data`, which holds the parts of all ranks; on other ranks, it has the size of a part."""
        parts = list(in_bytes(data).view(self.ranks, -1)) if self.group.rank() == root else None
        out = data if parts is None else data.new_empty(len(data) // self.ranks)
        work = distributed.scatter(in_bytes(out), parts, group=self.group, group_src=root, async_op=True)
        return awaited(work, out)

    def all_to_all(self, data: Tensor, received: Sequence[int], sent: Sequence[int]) -> Awaited:
        size = data.element_size()
        out = data.new_empty(sum(received))
        work = distributed.all_to_all_single(
            in_bytes(out),
            in_bytes(data),
            [n * size for n in received],
            [n * size for n in sent],
            group=self.group,
            async_op=True,
        )
        return awaited(work, out)


class Functional:
    """Call torch's functional collectives, which torch differentiates.

    Narrow fields are unpacked with a table, which a graph cannot hold as a constant.
    """

    def __init__(self, group: ProcessGroup, in_graph: bool) -> None:
        self.group_name = group.group_name
        self.ranks, self.rank = group.size(), group.rank()
        self.width = 8 if in_graph else 1

    def all_reduce(self, data: Tensor, op: str) -> Awaited:
        return self._awaited(torch.ops._c10d_functional.all_reduce(data, op, self.group_name))

    def reduce_scatter(self, data: Tensor, op: str) -> Awaited:
        ops = torch.ops._c10d_functional
        return self._awaited(ops.reduce_scatter_tensor(data, op, self.ranks, self.group_name))

    def all_gather(self, data: Tensor) -> Awaited:
        return self._awaited(torch.ops._c10d_functional.all_gather_into_tensor(data, self.ranks, self.group_name))

    def broadcast(self, data: Tensor, root: int) -> Awaited:
        if data.requires_grad:
            return self._awaited(Broadcast.apply(data, root, self.rank == root, self.group_name))
        wait = self._awaited(torch.ops._c10d_functional.broadcast(in_bytes(data), root, self.group_name))
        return lambda: wait().view(data.dtype)

    def all_to_all(self, data: Tensor, received: Sequence[int], sent: Sequence[int]) -> Awaited:
        ops = torch.ops._c10d_functional
        return self._awaited(ops.all_to_all_single(data, list(received), list(sent), self.group_name))

    @staticmethod
    def _awaited(started: Tensor) -> Awaited:
        return lambda: torch.ops._c10d_functional.wait_tensor(started)


class Broadcast(OwnFunction):
    """torch's functional broadcast, for which torch has no derivative: the root sends to all ranks, others nothing."""

    @staticmethod
    def forward(ctx: Any, data: Tensor, root: int, is_root: bool, group_name: str) -> Any:
        ctx.is_root, ctx.group_name = is_root, group_name
        return torch.ops._c10d_functional.broadcast(data, root, group_name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ops = torch.ops._c10d_functional
        total = ops.wait_tensor(ops.all_reduce(grad.contiguous(), "sum", ctx.group_name))
        return total if ctx.is_root else torch.zeros_like(total), None, None, None


def in_bytes(data: Tensor) -> Tensor:
    """View the memory as bytes, so that movements support every dtype."""
    return data.view(torch.uint8)


def _op(name: str) -> Any:
    return getattr(ReduceOp, name.upper())


# ---------------------------------------- validity: a byte holds several elements, each in a field of 1, 2, 4 or 8 bits

# An integer of this dtype spans the elements of one packed byte while each element still occupies its own byte.
_SPANNING = {1: torch.int64, 2: torch.int32, 4: torch.int16}
_WIDE = 32


def width_for(ranks: int) -> int:
    """Return the bits of a field that counts up to `ranks`."""
    return next((width for width in (2, 4, 8) if ranks < 1 << width), _WIDE)


def packed_size(elements: int, width: int) -> int:
    """Return the length of the tensor that `pack` returns for this many elements."""
    return -(-elements // (8 // width)) if width < 8 else elements


def pack(validity: Tensor, width: int) -> Tensor:
    """Pack one-dimensional int8 validity into fields of `width` bits in uint8; into int32 for a width of 32."""
    if width >= 8:
        return validity.to(torch.int32 if width == _WIDE else torch.uint8, copy=True)
    each = 8 // width
    missing = -len(validity) % each
    whole = torch.nn.functional.pad(validity, (0, missing)) if missing else validity.contiguous()
    if whole.storage_offset() % each:
        whole = whole.clone()  # integers must be aligned
    shift = 8 - width
    # The product adds the bytes shifted by 0, 1, 2 … fields; their set bits never overlap, so nothing carries.
    product = whole.view(_SPANNING[width]) * _shifts(width)
    return product.bitwise_right_shift_((each - 1) * shift).to(torch.uint8)


def unpack(fields: Tensor, width: int, elements: int) -> Tensor:
    """Return the number in each field, one-dimensional; uint8 unless the width is 32."""
    if width >= 8:
        return fields
    numbers = _numbers(width, fields.device)[fields.long()]
    return numbers.view(torch.uint8)[:elements]


def present(fields: Tensor, width: int, elements: int) -> Tensor:
    """Return whether each field is nonzero, as int8."""
    if width >= 8:
        return (fields > 0).view(torch.int8)
    if width == 1:
        return unpack(fields, width, elements).view(torch.int8)
    # The lowest bit of a field says whether any of its bits is set. Then each field gets a byte of its own, the reverse
    # of `pack`. A carry only reaches the next bit, which is never read.
    flags = fields | (fields >> 1) if width == 2 else fields | (fields >> 1) | (fields >> 2) | (fields >> 3)
    word = flags.bitwise_and_(_lowest_bits(width, 8)).to(_SPANNING[width])
    spread = word.mul_(_shifts(width)).bitwise_and_(_lowest_bits(8, 8 * (8 // width)))
    return spread.view(torch.int8)[:elements]


def digest_of_mask(validity: Tensor | None) -> str | None:
    """Return a digest of a CPU mask from its second use on; None for other masks.

    Reading a mask takes as long as sending it, so a digest only pays off for masks that persist, such as a parameter's.
    """
    if validity is None or type(validity) is not Tensor or not validity.is_cpu or validity.is_inference():
        return None
    kept = kept_with(validity)
    if not kept.get(("has travelled",)):
        kept["has travelled",] = True
        return None
    digest: str | None = kept.get(("digest",))
    if digest is None:
        digest = kept["digest",] = _digest(validity.contiguous())
    return digest


def _digest(validity: Tensor) -> str:
    found = hashlib.blake2b(repr(tuple(validity.shape)).encode(), digest_size=16)
    found.update((ctypes.c_char * validity.nbytes).from_address(validity.data_ptr()))
    return found.hexdigest()


def _shifts(width: int) -> int:
    """Return the factor whose product sums a number shifted by 0, 1, 2 … times (8 - width) bits."""
    return sum(1 << (8 - width) * field for field in range(8 // width))


def _lowest_bits(width: int, bits: int) -> int:
    """Return a number of this many bits in which the lowest bit of each field is set."""
    return sum(1 << place for place in range(0, bits, width))


@functools.lru_cache(maxsize=16)
def _numbers(width: int, device: torch.device) -> Tensor:
    """Return a table from each byte to the numbers in its fields, stored as one integer."""
    shifts = torch.arange(0, 8, width, device=device)
    each = (torch.arange(256, device=device)[:, None] >> shifts) & ((1 << width) - 1)
    return each.to(torch.uint8).view(_SPANNING[width]).flatten()
