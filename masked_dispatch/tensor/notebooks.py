"""Show a masked tensor in a notebook: its mask as a small picture, and below it the text of `repr`.

The picture is a PNG inside the page, with at most 64 by 96 pixels for any tensor. The opacity of each pixel is the
valid share of its block of elements, over a transparent grey, which suits light and dark pages. Where positions are not
there, the page shows.
"""

from __future__ import annotations

import base64
import html
import struct
import zlib
from typing import TYPE_CHECKING

import torch

from masked_dispatch.tensor.colours import GREY, GREY_OPACITY, INVALID_OVER_ANY_PAGE, VALID, red_green_blue
from masked_dispatch.tensor.printing import count_there, count_valid, is_readable, printed, record_size, share_of
from masked_dispatch.tensor.validity_blocks import ValidityBlocks, extent_as_mask, validity_blocks
from masked_dispatch.torch_internals import plainly
from op_registry.sparse.permuted import AnyRecord

if TYPE_CHECKING:
    from masked_dispatch.tensor.masked_tensor import MaskedTensor

MOST_ROWS, MOST_COLUMNS = 64, 96
# The longer side of the picture in CSS pixels, unless a block would be larger than LARGEST_BLOCK.
LONGER_SIDE, LARGEST_BLOCK = 288, 16


def html_of(tensor: MaskedTensor, record: AnyRecord) -> str:
    """Self-contained HTML without scripts for `tensor`; `record` is its record, without derivatives."""
    text = f'<pre style="margin:4px 0;line-height:1.25">{html.escape(printed(tensor, record))}</pre>'
    if not is_readable(tensor, record) or not record_size(record):
        return f"<div>{text}</div>"
    with plainly():
        valid, total = count_valid(record), count_there(record, extent_as_mask(record))
        blocks = validity_blocks(record, MOST_ROWS, MOST_COLUMNS)
    shape = " × ".join(map(str, tensor.shape)) or "one number"
    dtype = str(tensor.dtype).removeprefix("torch.")
    line = f"{shape}, {dtype}: {valid:,} of {total:,} valid ({html.escape(share_of(valid, total))})"
    if total < record_size(record):
        line += ", padded"
    note = note_of(blocks, tuple(tensor.shape))
    return f'<div><div style="margin:4px 0">{line}{note}</div>{picture_of(blocks, line)}{text}</div>'


def note_of(blocks: ValidityBlocks, shape: tuple[int, ...]) -> str:
    """Say which dimensions run down and across, if there are several, and which block a pixel shows, if it is one."""
    down, across = shape[: blocks.row_dims], shape[blocks.row_dims :]
    note = f"; {' · '.join(map(str, down))} down, {' · '.join(map(str, across))} across" if len(shape) > 2 else ""
    per_block = blocks.rows_per_block, blocks.columns_per_block
    return note if per_block == (1, 1) else f"{note}; a pixel is {per_block[0]} × {per_block[1]} elements"


def picture_of(blocks: ValidityBlocks, description: str) -> str:
    """The blocks as an image element."""
    rows, columns = blocks.valid.shape
    scale = min(LARGEST_BLOCK, LONGER_SIDE / max(rows, columns))
    background = "none" if blocks.padding.any() else INVALID_OVER_ANY_PAGE
    style = f"image-rendering:pixelated;background:{background};outline:1px solid rgba(128,128,128,.6)"
    encoded = base64.b64encode(png_of(blocks)).decode()
    return (
        f'<img alt="validity of {description}" width="{max(round(columns * scale), 2)}" '
        f'height="{max(round(rows * scale), 2)}" style="{style}" src="data:image/png;base64,{encoded}">'
    )


def png_of(blocks: ValidityBlocks) -> bytes:
    """A PNG with one pixel for each block: opaque for what is valid, transparent for what is not there.

    What is invalid is transparent too, over a grey background, or has that grey itself if something is not there.
    """
    valid, padding = blocks.valid.double() / blocks.elements, blocks.padding
    grey = (1 - padding - valid) * (GREY_OPACITY if padding.any() else 0)
    alphas = valid + grey
    weight = torch.where(alphas > 0, valid / alphas, 1)[..., None]
    colours = weight * torch.tensor(red_green_blue(VALID)) + (1 - weight) * GREY
    rows, columns = valid.shape
    pixels = torch.cat([colours, alphas[..., None] * 255], -1).round().int().tolist()
    lines = b"".join(b"\0" + b"".join(bytes(pixel) for pixel in line) for line in pixels)
    header = struct.pack(">IIBBBBB", columns, rows, 8, 6, 0, 0, 0)  # 8 bits each of red, green, blue and alpha
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
