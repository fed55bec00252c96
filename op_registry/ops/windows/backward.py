"""Gradient formulas of windows, called by hand; the law is in op_registry/laws/derivatives.py."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from op_registry.authoring import (
    DERIVATIVE,
    Bound,
    Dense,
    all_valid,
    by_rule,
    derivative,
    fill_where_invalid,
    intersect,
    masked_rule,
    packet_name,
    requested_gradients,
    run_plain,
    vjp,
)
from op_registry.ops.windows.interpolation import LINEAR, NEAREST, NEEDS_ALL_VALID

aten = torch.ops.aten

avg_pool2d_backward = derivative(aten.avg_pool2d_backward.default, of=aten.avg_pool2d.default)
avg_pool3d_backward = derivative(aten.avg_pool3d_backward.default, of=aten.avg_pool3d.default)
_adaptive_avg_pool2d_backward = derivative(
    aten._adaptive_avg_pool2d_backward.default,
    of=aten._adaptive_avg_pool2d.default,
    output_size=lambda bound: bound["grad_output"].shape[-2:],
)
_adaptive_avg_pool3d_backward = derivative(
    aten._adaptive_avg_pool3d_backward.default,
    of=aten._adaptive_avg_pool3d.default,
    output_size=lambda bound: bound["grad_output"].shape[-3:],
)


@masked_rule(
    aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices_backward.default,
    aten.adaptive_max_pool2d_backward.default,
    aten.adaptive_max_pool3d_backward.default,
    aten.fractional_max_pool2d_backward.default,
    aten.fractional_max_pool3d_backward.default,
    category=DERIVATIVE,
    takes_op=True,
)
def max_pool_backward(op: OpOverload, grad_output: Dense, self: Dense, *arguments: Any) -> Dense:
    """Each gradient goes to the maximum to which `indices`, the last argument, points; an invalid one goes nowhere."""
    *geometry, indices = arguments
    counted = fill_where_invalid(grad_output.data, intersect(grad_output.validity, indices.validity), 0)
    return self.like(op(counted, self.data, *geometry, indices.filled(0)))


@masked_rule(aten.convolution_backward.default, category=DERIVATIVE, takes_call=True)
def convolution_backward(c: Bound) -> tuple[Dense | None, ...]:
    """Gradients for input, weight and bias. The operator takes only the size of the bias, which counts as all valid.

    The gradient of the input reads only the weight, and the gradient of the weight only the input. If the requested
    gradients read only an operand's size, it counts as all valid, too (torch.nn.grad passes uninitialised operands).
    """
    input, weight = (
        operand if read else Dense(torch.zeros_like(operand.data))
        for operand, read in ((c.input, c.output_mask[1]), (c.weight, c.output_mask[0]))
    )
    _, _, _, bias_sizes, *geometry, output_mask = c.named.values()
    if all_valid(c.grad_output, input, weight):
        return run_plain(c.op, (c.grad_output, input, weight, bias_sizes, *geometry, output_mask), {})
    bias = Dense(weight.data.new_zeros((c.grad_output.shape[1],)))

    def convolve(x: Dense, w: Dense, b: Dense) -> Any:
        return by_rule(aten.convolution.default, x, w, b, *geometry)

    return requested_gradients(vjp(convolve, (input, weight, bias), c.grad_output), output_mask)


@masked_rule(aten._slow_conv2d_backward.output_mask, category=DERIVATIVE, takes_call=True, torch_if_valid=True)
def _slow_conv2d_backward(c: Bound) -> Any:
    """Like convolution_backward, without dilation and groups."""
    arguments = (None, c.stride, c.padding, [1, 1], False, [0, 0], 1, c.output_mask)
    return by_rule(aten.convolution_backward.default, c.grad_output, c.self, c.weight, *arguments)


@masked_rule(
    *(getattr(aten, f"{packet_name(packet)}_backward").default for packet in (*NEAREST, *LINEAR, *NEEDS_ALL_VALID)),
    category=DERIVATIVE,
    takes_op=True,
)
def upsample_backward(op: OpOverload, grad_output: Dense, *sizes: Any) -> Dense:
    return Dense(op(grad_output.filled(0), *sizes))
