"""How a masked tensor prints: torch's own layout, with -- where invalid."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from masked_dispatch.torch_internals import NumberFormatter, print_options, summarized_data
from op_registry.records.dims import Number
from op_registry.records.tracing import being_traced
from op_registry.records.validity import as_bool

_HIDDEN = "--"


def describe(data: Tensor, validity: Tensor | None, hidden: bool) -> list[str]:
    """The values with -- where invalid, then the facts printed after them; honours torch.set_printoptions.

    hidden  whether the values must not be inspected, as inside a transform
    """
    if hidden or data.device.type == "meta" or being_traced(data):
        parts = ["...", f"size={tuple(data.shape)}", "mask=None" if validity is None else "mask=..."]
    else:
        mask = torch.ones_like(data, dtype=torch.bool) if validity is None else as_bool(validity)
        parts = [_body(data.detach(), mask), f"valid={int(mask.sum())}/{mask.numel()}", "True=valid"]
    if data.dtype not in (torch.get_default_dtype(), torch.int64, torch.bool):
        parts.append(f"dtype={data.dtype}")
    if data.device.type != "cpu":
        parts.append(f"device='{data.device}'")
    return parts


def _body(data: Tensor, mask: Tensor) -> str:
    options = print_options()
    if data.numel() == 0:
        return f"[], size={tuple(data.shape)}" if data.ndim != 1 else "[]"
    safe = torch.where(mask, data, torch.zeros_like(data))
    summarise = data.numel() > options.threshold
    shown = summarized_data(safe) if summarise else safe
    visible = summarized_data(mask) if summarise else mask
    shown, visible = shown.cpu(), visible.cpu()  # at once, not one element after another
    cell = _formatter_of(shown[visible] if bool(visible.any()) else shown.new_zeros(1))
    indent = len("masked_tensor(")

    def rows(values: Tensor, valid: Tensor, full: torch.Size, depth: int) -> str:
        if values.ndim == 0:
            return cell(values.item() if bool(valid) else None)
        cut = summarise and full[0] > 2 * options.edgeitems
        pieces = [rows(v, m, full[1:], depth + 1) for v, m in zip(values, valid, strict=True)]
        if cut:
            pieces[options.edgeitems : options.edgeitems] = ["..."]
        if values.ndim == 1:
            per_line = max(1, (options.linewidth - indent) // (max(len(p) for p in pieces) + 2))
            lines = [", ".join(pieces[i : i + per_line]) for i in range(0, len(pieces), per_line)]
            return "[" + (",\n" + " " * (indent + depth + 1)).join(lines) + "]"
        gap = "\n" * (values.ndim - 1)
        return "[" + ("," + gap + " " * (indent + depth + 1)).join(pieces) + "]"

    return rows(shown, visible, data.shape, 0)


def _formatter_of(valid_values: Tensor) -> Callable[[Number | None], str]:
    """The function that prints one number as torch does in a tensor of `valid_values`, and None as invalid."""
    if not valid_values.is_complex():
        real = NumberFormatter(_computable(valid_values))
        width = real.width()
        return lambda value: _HIDDEN.rjust(width) if value is None else real.format(value)
    wide = valid_values.to(torch.promote_types(valid_values.dtype, torch.complex64))
    real, imaginary = NumberFormatter(torch.real(wide)), NumberFormatter(torch.imag(wide))

    def number(value: complex) -> str:
        imaginary_part = imaginary.format(value.imag).strip()
        sign = "" if imaginary_part.startswith(("+", "-")) else "+"
        return f"{real.format(value.real)}{sign}{imaginary_part}j"

    complex_width = len(number(wide[0].item()))
    return lambda value: _HIDDEN.rjust(complex_width) if value is None else number(value)


def _computable(values: Tensor) -> Tensor:
    """Floating-point values of a dtype with kernels for what the formatter computes: float32 for narrower ones."""
    narrow = values.is_floating_point() and values.dtype.itemsize < torch.float32.itemsize
    return values.float() if narrow else values
