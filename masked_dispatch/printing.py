"""How a masked tensor prints: torch's own layout, with -- where invalid."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from masked_dispatch.storage.wrapper import SparselyStored
from masked_dispatch.tensor import MaskedTensor
from op_registry.records import Dense, as_bool, being_traced

_HIDDEN = "--"


def describe(tensor: MaskedTensor) -> str:
    """Values with -- where invalid, and the share of valid elements; honours torch.set_printoptions."""
    facts = []
    if isinstance(tensor, SparselyStored):
        return _described_sparsely(tensor)
    data, validity = tensor._data, Dense(tensor._data, tensor._validity).full_validity
    if data.device.type == "meta" or being_traced(data) or tensor._carries_transform:
        body = f"..., size={tuple(tensor.shape)}"
        facts.append("mask=None" if validity is None else "mask=...")
    else:
        mask = torch.ones_like(data, dtype=torch.bool) if validity is None else as_bool(validity)
        body = _body(data.detach(), mask)
        facts.append(f"valid={int(mask.sum())}/{mask.numel()}, True=valid")
    if data.dtype not in (torch.get_default_dtype(), torch.int64, torch.bool):
        facts.append(f"dtype={data.dtype}")
    if data.device.type != "cpu":
        facts.append(f"device='{data.device}'")
    if tensor.grad_fn is not None:
        facts.append(f"grad_fn=<{type(tensor.grad_fn).__name__}>")
    elif tensor.requires_grad:
        facts.append("requires_grad=True")
    return f"masked_tensor({body}, {', '.join(facts)})"


def _described_sparsely(tensor: SparselyStored) -> str:
    facts = [f"stored as {tensor.storage_layout}, nnz={tensor.nnz}", f"dtype={tensor.dtype}"]
    traced = being_traced(tensor._kept_values)
    if not traced and tensor.numel() <= torch._tensor_str.PRINT_OPTS.threshold:
        with torch.no_grad():
            return f"{describe(tensor.to_layout(torch.strided))[:-1]}, {facts[0]})"
    return f"masked_tensor(..., size={tuple(tensor.shape)}, {', '.join(facts)}, True=valid)"


def _body(data: Tensor, mask: Tensor) -> str:
    options: Any = torch._tensor_str.PRINT_OPTS
    if data.numel() == 0:
        return f"[], size={tuple(data.shape)}" if data.ndim != 1 else "[]"
    safe = torch.where(mask, data, torch.zeros_like(data))
    summarise = data.numel() > options.threshold
    shown = torch._tensor_str.get_summarized_data(safe) if summarise else safe
    visible = torch._tensor_str.get_summarized_data(mask) if summarise else mask
    valid_values = shown[visible] if bool(visible.any()) else shown.new_zeros(1)
    formatter = torch._tensor_str._Formatter(
        torch.real(valid_values)
        if data.is_complex()
        else valid_values.float()
        if data.dtype in (torch.bfloat16, torch.float16)
        else valid_values
    )
    imaginary = torch._tensor_str._Formatter(torch.imag(valid_values)) if data.is_complex() else None
    indent = len("masked_tensor(")

    def cell(value: Any, valid: bool) -> str:
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
