"""Pack validity for messages: a byte holds several elements, each in a field of 1, 2, 4 or 8 bits.

Movements need one bit for each element. A sum over ranks counts the valid contributions of each element, so a field
must hold the number of ranks, or it would carry into the next field. Masks of float32 data therefore add 3 % to the
bytes of a movement, and 6, 12 or 25 % to a reduction over up to 3, 15 or any number of ranks; over more than 255 ranks,
a mean needs fields of 32 bits. (A bitwise "or" would need one bit, but not every backend supports it.)

If all ranks have the same mask, as gradients of a masked parameter do, a reduction need not send it: each rank sends
only a digest of its mask, in the description of the call.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib

import torch
from torch import Tensor

from op_registry.records.kept import kept_with

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
