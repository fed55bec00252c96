"""A masked tensor as text and as a picture.

`repr` prints as torch prints the data, with -- where invalid, and with facts about the storage. In a notebook, the mask
is a small picture above that text.
"""

from __future__ import annotations

import base64
import html
import math
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from masked_dispatch.tensor.shown import (
    ValidityBlocks,
    all_elements,
    edges,
    extent_as_mask,
    first_and_last_valid,
    validity_blocks,
)
from masked_dispatch.torch_internals import (
    NumberFormatter,
    default_device_type,
    name_of_node,
    plainly,
    print_options,
    with_facts,
)
from op_registry.records.arguments import Number
from op_registry.records.dense import Dense
from op_registry.records.tracing import being_traced
from op_registry.records.validity import as_bool
from op_registry.sparse.permuted import AnyRecord, Permuted
from op_registry.sparse.record import Sparse

if TYPE_CHECKING:
    from masked_dispatch.tensor.masked_tensor import MaskedTensor


# -------------------------------------------------------------------------------------------------------------- colours

VALID = "#3b7dd8"
# For a white page; no text on our pages has this grey.
INVALID = "#dfdfdf"
# The same grey for pages that may also be dark: over white it looks like INVALID. And its parts.
INVALID_OVER_ANY_PAGE = "rgba(128,128,128,.25)"
GREY, GREY_OPACITY = 128, 0.25
# The page, where it is white.
NOT_THERE = "#ffffff"


def red_green_blue(colour: str) -> tuple[int, int, int]:
    """The three numbers, 0 to 255, of a colour written as above."""
    red, green, blue = bytes.fromhex(colour.removeprefix("#"))
    return red, green, blue


# ----------------------------------------------------------------------------------------------------------------- text

_HIDDEN = "--"
# For what is not there, and for what is missing.
_WORDS = ("", _HIDDEN)
# Below this valid share we may list elements with their indices.
MOSTLY_INVALID = 0.1
_PREFIX = "masked_tensor("


def printed(tensor: MaskedTensor, record: AnyRecord) -> str:
    """The text of `tensor`; `record` is its record, without derivatives."""
    with plainly():
        readable = is_readable(tensor, record)
        summarized = readable and record_size(record) > print_options().threshold
        valid = count_valid(record) if readable else 0
        extent = extent_as_mask(record) if readable else None
        body = _body(record, summarized, valid, extent) if readable else "..."
        facts = [
            *_facts_of_values(record, valid, tensor.device, readable, summarized, extent),
            *_facts_of_storage(tensor, readable, summarized),
        ]
    text = with_facts(_PREFIX + body, [*facts, *facts_of_autograd(tensor)], len(_PREFIX), False)
    return f"Parameter({text})" if getattr(tensor, "_is_param", False) else text


def is_readable(tensor: MaskedTensor, record: AnyRecord) -> bool:
    """Whether we may read the values: not in a transform, while tracing, or on meta."""
    return not (tensor._carries_transform or record.device.type == "meta" or being_traced(stored(record)))


def stored(record: AnyRecord) -> Tensor:
    """The tensor of stored values."""
    if isinstance(record, Dense):
        return record.data
    return stored(record.base) if isinstance(record, Permuted) else record.values.data


def record_size(record: AnyRecord) -> int:
    """Number of elements."""
    return math.prod(record.shape)


def count_there(record: AnyRecord, extent: Dense | None) -> int:
    """Number of elements at positions that are there: the valid ones of `extent`."""
    return record_size(record) if extent is None else count_valid(extent)


def count_valid(record: AnyRecord) -> int:
    """Number of valid elements."""
    if isinstance(record, Permuted):
        return count_valid(record.base)
    return int(record.values.count() if isinstance(record, Sparse) else record.count())


# -------------------------------------------------------------------------------------------------------------- facts


def _facts_of_values(
    record: AnyRecord, valid: int, device: torch.device, readable: bool, summarized: bool, extent: Dense | None
) -> list[str]:
    """The number of valid elements among those that are there, the shape if there are others or the values do not show
    it, device and dtype if torch prints them.
    """
    size = f"size={tuple(record.shape)}"
    if readable:
        total, there = record_size(record), count_there(record, extent)
        share = f" ({share_of(valid, there)})" if summarized else ""
        facts = [size] if summarized or (total == 0 and record.ndim != 1) else []
        facts += [f"valid={valid}/{there}{share}"]
        if there < total:
            facts += ["padded" if summarized else f"padded to {tuple(record.shape)}"]
        facts += ["True=valid"]
    else:
        unmasked = isinstance(record, Dense) and record.validity is None
        facts = [size, "mask=None" if unmasked else "mask=..."]
    kind = device.type
    if kind != default_device_type() or (kind == "cuda" and torch.cuda.current_device() != device.index):
        facts.append(f"device='{device}'")
    default = torch.get_default_dtype()
    default_complex = torch.complex128 if default is torch.float64 else torch.complex64
    empty = any(type(n) is int and n == 0 for n in record.shape)  # a graph may not know a size
    usual = (default,) if empty else (default, default_complex, torch.int64, torch.bool)
    return facts if record.dtype in usual else [*facts, f"dtype={record.dtype}"]


def _facts_of_storage(tensor: MaskedTensor, readable: bool, summarized: bool) -> list[str]:
    """The layout and the number of stored elements; for dense storage only if the text does not show all values."""
    if tensor.storage_layout is torch.strided:
        return ["stored as torch.strided"] if readable and summarized else []
    nnz = f", nnz={tensor.nnz}" if readable else ""
    return [f"stored as {tensor.storage_layout}{nnz}"]


def facts_of_autograd(tensor: MaskedTensor) -> list[str]:
    """The name of the node that made the tensor, or the fact that it requires grad, and its tangent."""
    node = name_of_node(tensor)
    facts = [f"grad_fn=<{node}>"] if node else ["requires_grad=True"] if tensor.requires_grad else []
    tangent = None if tensor._carries_transform else torch.autograd.forward_ad.unpack_dual(tensor).tangent
    return facts if tangent is None else [*facts, f"tangent={tangent}"]


def share_of(valid: int, total: int) -> str:
    """The share of valid elements in percent; 0% and 100% are exact."""
    if valid in (0, total):
        return "100%" if valid else "0%"
    share = f"{valid / total:.1%}"
    return {"0.0%": "<0.1%", "100.0%": ">99.9%"}.get(share, share)


# ------------------------------------------------------------------------------------------------------------- values


@dataclass(frozen=True)
class _Cells:
    """Formats single elements.

    text   formats a number; of what has no value, a word stands for it
    width  the column width that torch computes with
    """

    text: Callable[[Number | str], str]
    width: int


def _body(record: AnyRecord, summarized: bool, valid: int, extent: Dense | None) -> str:
    """The values in brackets, with -- where invalid and blanks for padding; or the first and last valid ones in braces.

    valid   number of valid elements
    extent  is valid where positions are there; None: all are
    """
    if record_size(record) == 0:
        return "[]"
    options = print_options()
    shown, mask = _shown(record, summarized)
    there = torch.ones_like(mask) if extent is None else _shown(extent, summarized)[1]
    listed = min(valid, 2 * options.edgeitems)
    if summarized and valid < MOSTLY_INVALID * record_size(record) and int(mask.sum()) < listed:
        return _list(record, valid, options.edgeitems)
    values = _computable(shown.data, record.dtype)
    missing = bool((mask != there).any())
    cells = _cells_of(values[mask], len(_HIDDEN) if missing else None if bool(mask.all()) else 0)
    edge = options.edgeitems if summarized else None
    words = torch.where(mask, -1, there.to(torch.int64)).tolist()
    return _rows(values.tolist(), words, list(record.shape), len(_PREFIX), edge, cells)


def _shown(record: AnyRecord, summarized: bool) -> tuple[Dense, Tensor]:
    """The elements that are shown, and which of them are valid."""
    shown = edges(record, print_options().edgeitems) if summarized else all_elements(record)
    validity = shown.full_validity
    return shown, torch.ones_like(shown.data, dtype=torch.bool) if validity is None else as_bool(validity)


def _list(record: AnyRecord, valid: int, edge: int) -> str:
    """``{index: value}`` for the first and last `edge` of the valid elements, aligned."""
    coordinates, shown = first_and_last_valid(record, edge)
    values = _computable(shown.data, record.dtype)
    cells = _cells_of(values, None)
    widths = [len(str(int(c.max()))) for c in coordinates]
    elements = zip(*(c.tolist() for c in coordinates), strict=True)
    indices = [", ".join(str(i).rjust(w) for i, w in zip(index, widths, strict=True)) for index in elements]
    several = len(coordinates) > 1
    pieces = [
        f"{f'({index})' if several else index}: {cells.text(value)}"
        for index, value in zip(indices, values.tolist(), strict=True)
    ]
    per_line = 1 if several else max(1, (print_options().linewidth - len(_PREFIX)) // (len(pieces[0]) + 2))
    if valid > len(pieces):
        pieces[edge:edge] = ["..." if per_line == 1 else " ..."]
    lines = [", ".join(pieces[i : i + per_line]) for i in range(0, len(pieces), per_line)]
    return "{" + (",\n" + " " * (len(_PREFIX) + 1)).join(lines) + "}"


def _rows(values: Any, words: Any, sizes: list[int], indent: int, edge: int | None, cells: _Cells) -> str:
    """Nested lists of the shown elements as text.

    words   which of _WORDS stands for each element; -1: its value does
    sizes   the sizes of the remaining dimensions of the whole tensor
    indent  columns to the left
    edge    how many elements to show at each end of a long dimension; None: all
    """
    if not sizes:
        return cells.text(values if words < 0 else _WORDS[words])
    last = len(sizes) == 1
    pairs = zip(values, words, strict=True)
    pieces = [_rows(value, word, sizes[1:], indent + 1, edge, cells) for value, word in pairs]
    if edge is not None and (sizes[0] > 2 * edge or not edge):
        pieces[edge:edge] = [" ..." if last and edge else "..."]
    if not last:
        return "[" + ("," + "\n" * (len(sizes) - 1) + " " * (indent + 1)).join(pieces) + "]"
    per_line = max(1, (print_options().linewidth - indent) // cells.width)
    lines = [", ".join(pieces[i : i + per_line]) for i in range(0, len(pieces), per_line)]
    return "[" + (",\n" + " " * (indent + 1)).join(lines) + "]"


def _cells_of(valid_values: Tensor, least: int | None) -> _Cells:
    """The formats that torch uses for a tensor of these values, beside words up to `least` letters (None: no word)."""
    if not valid_values.is_complex():
        real = NumberFormatter(valid_values)
        width = max(real.width(), least or 0)
        if least == 0:  # torch's width of a tensor of zeros is that of 0, and it prints 0.
            width = max((len(real.format(value)) for value in valid_values.tolist()), default=width)
        return _Cells(lambda v: (v if isinstance(v, str) else real.format(v)).rjust(width), width + 2)
    real, imaginary = NumberFormatter(torch.real(valid_values)), NumberFormatter(torch.imag(valid_values))

    def number(value: complex) -> str:
        imaginary_part = imaginary.format(value.imag).strip()
        sign = "" if imaginary_part.startswith(("+", "-")) else "+"
        return f"{real.format(value.real)}{sign}{imaginary_part}j"

    # torch aligns the real parts alone.
    width = 0 if least is None else max((len(number(value)) for value in valid_values.tolist()), default=least)
    return _Cells(
        lambda v: (v if isinstance(v, str) else number(v)).rjust(width),
        max(width, real.width() + imaginary.width() + 1) + 2,
    )


def _computable(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The values in a dtype that has the kernels the formatter needs: float32 for narrower floats."""
    if dtype.is_complex:
        return values.to(torch.promote_types(values.dtype, torch.complex64))
    narrow = dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize
    return values.float() if narrow else values


# ------------------------------------------------------------------------------------------------------------ notebooks

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
