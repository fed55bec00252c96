"""Gradient formulas of reductions, called by hand; the law is in op_registry/laws/derivatives.py."""

from __future__ import annotations

import torch

from op_registry.authoring import derivative

aten = torch.ops.aten

_segment_reduce_backward = derivative(
    aten._segment_reduce_backward.default, of=aten.segment_reduce.default, by=("data",)
)
