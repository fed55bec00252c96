"""Gradient formulas of attention, called by hand; the law is in op_registry/laws/derivatives.py."""

from __future__ import annotations

import torch

from op_registry.authoring import derivative

aten = torch.ops.aten

_scaled_dot_product_flash_attention_for_cpu_backward = derivative(
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    of=aten._scaled_dot_product_flash_attention_for_cpu.default,
    by=("query", "key", "value"),
)
