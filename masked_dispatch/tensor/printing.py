"""How a masked tensor prints: torch's own layout, with -- where invalid."""

from __future__ import annotations

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
    valid_values = shown[visible] if bool(visible.any()) else shown.new_zeros(1)
    formatter = NumberFormatter(
        torch.real(valid_values)
        if data.is_complex()
        else valid_values.float()
        if data.dtype in (torch.bfloat16, torch.float16)
        else valid_values
    )
    imaginary = NumberFormatter(torch.imag(valid_values)) if data.is_complex() else None
    indent = len("masked_tensor(")

    def cell(value: Number, valid: bool) -> str:
        width = formatter.width()
        if not valid:
            return _HIDDEN.rjust(width)
        if imaginary is not None:
            return f"{formatter.format(value.real)}+{imaginary.format(value.imag).strip()}j"
        return formatter.format(value)

    def rows(values: Tensor, valid: Tensor, full: torch.Size, depth: int) -> str:
        if values.ndim == 0:
            return cell(values.item(), bool(valid))
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
