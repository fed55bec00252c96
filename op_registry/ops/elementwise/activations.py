"""Activation functions.

Law: elementwise, as in pointwise.py. `glu` is elementwise on the two halves of its input: an output is valid where both
halves are. The backward operators follow the same law; autograd does not use their rules, because rules run above
autograd, but they can be called directly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    COMPOSITE,
    ELEMENTWISE,
    Along,
    Dense,
    Number,
    Permuted,
    Sparse,
    as_int8,
    elementwise,
    masked_rule,
    never,
)

aten = torch.ops.aten

celu = elementwise(aten.celu)
elu = elementwise(aten.elu)
gelu = elementwise(aten.gelu, keeps_zero=True)
hardshrink = elementwise(aten.hardshrink)
hardsigmoid = elementwise(aten.hardsigmoid)
hardswish = elementwise(aten.hardswish)
hardtanh = elementwise(aten.hardtanh)
leaky_relu = elementwise(aten.leaky_relu)
log_sigmoid = elementwise(aten.log_sigmoid)
mish = elementwise(aten.mish)
relu = elementwise(aten.relu, keeps_zero=True)
relu6 = elementwise(aten.relu6)
selu = elementwise(aten.selu)
silu = elementwise(aten.silu, keeps_zero=True)
softplus = elementwise(aten.softplus)
softshrink = elementwise(aten.softshrink)
threshold = elementwise(aten.threshold)
# Fills call it (records/fill.py), in torch's older vmap of gradients on masked tensors.
threshold_backward = elementwise(aten.threshold_backward.default)
# The input times 1 or times the weight: the derivative in one operand has the other as its factor.
_prelu_kernel = elementwise(aten._prelu_kernel, derivative="bilinear")
# In training a slope is drawn wherever the input is not positive: garbage must not change how many are drawn.
rrelu = elementwise(aten.rrelu, traps=True, neutral=0)


@masked_rule(aten.rrelu_with_noise_functional, category=ELEMENTWISE)
def rrelu_with_noise_functional(
    self: Dense,
    noise: Dense,
    lower: Number = 0.125,
    upper: Number = 1 / 3,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[Dense, Dense]:
    """rrelu, and the slopes that were drawn. Without training nothing is drawn, and `noise` is returned."""
    result, drawn = aten.rrelu_with_noise_functional(self.filled(0), noise.data, lower, upper, training, generator)
    slopes = self.like(drawn)
    return self.like(result), slopes if training else slopes.masked_by(noise.validity)


@masked_rule(aten.rrelu_with_noise.default, aten.rrelu_with_noise_.default, category=COMPOSITE, takes_op=True)
def rrelu_with_noise(
    op: OpOverload,
    self: Tensor,
    noise: Tensor,
    lower: Number = 0.125,
    upper: Number = 1 / 3,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """rrelu; training writes the slopes to `noise`. A plain `noise` keeps its old values where the input is invalid."""
    if training:
        with torch.no_grad():
            _, drawn = aten.rrelu_with_noise_functional(self, noise, lower, upper, training, generator)
            noise.copy_(drawn)
        result = self * drawn  # torch's derivative of the functional form reads the noise that it was given
    else:
        result = aten.leaky_relu(self, (lower + upper) / 2)
    return self.copy_(result) if op is aten.rrelu_with_noise_.default else result


@masked_rule(aten.log_sigmoid_forward, category=ELEMENTWISE)
def log_sigmoid_forward(self: Dense) -> tuple[Dense, Any]:
    """log_sigmoid, and a buffer for backward, which is empty on some devices."""
    result, buffer = aten.log_sigmoid_forward(self.data)
    return self.like(result), self.like(buffer) if buffer.shape == self.shape else buffer


log_sigmoid_forward.lowering(Sparse)(never("its second result is an internal buffer of torch"))
log_sigmoid_forward.lowering(Permuted)(never("its second result is an internal buffer of torch"))


@masked_rule(aten.glu, category=ELEMENTWISE, dims=Along("window"))
def glu(self: Dense, dim: int = -1) -> Dense:
    """The first half times the sigmoid of the second; valid where both are."""
    data = aten.glu(self.filled(0), dim)
    if self.full_validity is None:
        return Dense(data)
    first, second = as_int8(self.full_validity).chunk(2, dim)
    return Dense(data, first & second)
