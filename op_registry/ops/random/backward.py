"""Derivatives of samples in their parameters, called directly; op_registry/laws/derivatives.py states the law."""

from __future__ import annotations

import torch

from op_registry.authoring import elementwise

aten = torch.ops.aten

_standard_gamma_grad = elementwise(aten._standard_gamma_grad.default)
_dirichlet_grad = elementwise(aten._dirichlet_grad.default, neutral=0.5)
