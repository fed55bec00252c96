"""Validity on the wire: several elements to a byte, each in a field of 1, 2, 4 or 8 bits.

One bit moves a mask. A sum over ranks needs a field that holds their number, and then counts the valid contributions of
each element, without a carry from one field to the next. So masks of float32 data cost 3 % of its bytes when moved,
and 6, 12 or 25 % when reduced over up to 3, 15 or any number of ranks; over more than 255, a mean needs numbers of 32
bits. (A bitwise "or" would need one bit, and not every backend has it.)

A mask that all ranks have, as gradients of a masked parameter do, need not travel to be reduced: its digest does, with
the description of the call.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib

import torch
from torch import Tensor

from op_registry.records.kept import kept_with

# The integer that spans the elements of one byte, while each still has a byte of its own.
_SPANNING = {1: torch.int64, 2: torch.int32, 4: torch.int16}
_WIDE = 32


def width_for(ranks: int) -> int:
    """Bits of a field that counts up to `ranks`."""
    return next((width for width in (2, 4, 8) if ranks < 1 << width), _WIDE)


def packed_size(elements: int, width: int) -> int:
    """The number of numbers that `pack` makes of so many elements."""
    return -(-elements // (8 // width)) if width < 8 else elements


def pack(validity: Tensor, width: int) -> Tensor:
    """One-dimensional int8 validity as fields of `width` bits in uint8; as int32 for a width of 32."""
    if width >= 8:
        return validity.to(torch.int32 if width == _WIDE else torch.uint8, copy=True)
    each = 8 // width
    missing = -len(validity) % each
    whole = torch.nn.functional.pad(validity, (0, missing)) if missing else validity.contiguous()
    if whole.storage_offset() % each:
        whole = whole.clone()  # integers have to be aligned
    shift = 8 - width
    # The product has the bytes shifted by 0, 1, 2 … fields; no two of its bits meet, so that nothing is carried.
    product = whole.view(_SPANNING[width]) * _shifts(width)
    return product.bitwise_right_shift_((each - 1) * shift).to(torch.uint8)


def unpack(fields: Tensor, width: int, elements: int) -> Tensor:
    """The number in each field, one-dimensional; uint8 unless the width is 32."""
    if width >= 8:
        return fields
    numbers = _numbers(width, fields.device)[fields.long()]
    return numbers.view(torch.uint8)[:elements]


def present(fields: Tensor, width: int, elements: int) -> Tensor:
    """Whether the number in each field is not 0, as int8."""
    if width >= 8:
        return (fields > 0).view(torch.int8)
    if width == 1:
        return unpack(fields, width, elements).view(torch.int8)
    # A lowest bit says whether any is set; then each field gets a byte of its own, the reverse of `pack`. What is
    # carried where bits meet ends in the next bit, which is none of those that are read.
    flags = fields | (fields >> 1) if width == 2 else fields | (fields >> 1) | (fields >> 2) | (fields >> 3)
    word = flags.bitwise_and_(_lowest_bits(width, 8)).to(_SPANNING[width])
    spread = word.mul_(_shifts(width)).bitwise_and_(_lowest_bits(8, 8 * (8 // width)))
    return spread.view(torch.int8)[:elements]


def digest_of_mask(validity: Tensor | None) -> str | None:
    """A digest of a mask that comes for the second time; None of any other, and of one that is not on the CPU.

    Reading a mask takes as long as sending it: that is for masks that stay, as those of parameters do.
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
    """The factor that adds up a number shifted by 0, 1, 2 … times what a field is smaller than a byte."""
    return sum(1 << (8 - width) * field for field in range(8 // width))


def _lowest_bits(width: int, bits: int) -> int:
    """A number of so many bits in which the lowest bit of each field is set."""
    return sum(1 << place for place in range(0, bits, width))


@functools.lru_cache(maxsize=16)
def _numbers(width: int, device: torch.device) -> Tensor:
    """For each byte the numbers in its fields, read as one integer."""
    shifts = torch.arange(0, 8, width, device=device)
    each = (torch.arange(256, device=device)[:, None] >> shifts) & ((1 << width) - 1)
    return each.to(torch.uint8).view(_SPANNING[width]).flatten()
