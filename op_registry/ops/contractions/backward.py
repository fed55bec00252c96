"""Gradient formulas of distances, called by hand; the law is in op_registry/laws/derivatives.py."""

from __future__ import annotations

import torch

from op_registry.authoring import derivative

aten = torch.ops.aten

_cdist_backward = derivative(aten._cdist_backward.default, of=aten._cdist_forward.default, by=("x1",))
_pdist_backward = derivative(aten._pdist_backward.default, of=aten._pdist_forward.default)
