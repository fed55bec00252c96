"""Backward operators of elementwise operators, called directly; op_registry/laws/derivatives.py states the law."""

from __future__ import annotations

import torch

from op_registry.authoring import (
    DERIVATIVE,
    Dense,
    by_rule,
    derivative,
    elementwise,
    fill_where_invalid,
    intersect,
    masked_rule,
    opaque,
    vjp,
)

aten = torch.ops.aten

glu_backward = derivative(aten.glu_backward.default, of=aten.glu.default)


# Forward-mode autograd's formulas for glu; on masked tensors it differentiates through glu's rule instead.
glu_jvp = opaque(aten.glu_jvp.default, aten.glu_backward_jvp.default)


@masked_rule(aten._prelu_kernel_backward.default, category=DERIVATIVE, torch_if_valid=True)
def _prelu_kernel_backward(grad_output: Dense, self: Dense, weight: Dense) -> tuple[Dense, ...]:
    """Elementwise, for the weight too, which is expanded to the input's shape here."""
    slopes = weight.map(lambda t: t.expand(self.shape))
    return vjp(lambda x, w: by_rule(aten._prelu_kernel.default, x, w), (self, slopes), grad_output)


rrelu_with_noise_backward = elementwise(aten.rrelu_with_noise_backward.default)


@masked_rule(aten.log_sigmoid_backward.default, category=DERIVATIVE)
def log_sigmoid_backward(grad_output: Dense, self: Dense, buffer: Dense) -> Dense:
    """Elementwise in gradient and input; the buffer (empty on some devices) is recomputed from the input."""
    validity = intersect(grad_output.validity, self.validity)
    grad, x = (fill_where_invalid(t, validity, 0) for t in (grad_output.data, self.data))
    saved = buffer.data if validity is None else aten.log_sigmoid_forward(x)[1]
    return Dense(aten.log_sigmoid_backward(grad, x, saved), validity)
