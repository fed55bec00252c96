"""Backward operators of padding, called directly; op_registry/laws/derivatives.py states the law."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._ops import OpOverload

from op_registry.authoring import DERIVATIVE, Dense, masked_rule

aten = torch.ops.aten


@masked_rule(
    aten.reflection_pad1d_backward.default,
    aten.reflection_pad2d_backward.default,
    aten.reflection_pad3d_backward.default,
    aten.replication_pad1d_backward.default,
    aten.replication_pad2d_backward.default,
    aten.replication_pad3d_backward.default,
    category=DERIVATIVE,
    takes_op=True,
)
def pad_backward(op: OpOverload, grad_output: Dense, self: Dense, padding: Sequence[int]) -> Dense:
    """Each element gets the sum of the gradients of its copies."""
    return self.like(op(grad_output.filled(0), self.data, padding))
