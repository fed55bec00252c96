"""Backward operators that torch's operator database calls."""

from __future__ import annotations

import torch
from torch import Tensor

from op_registry.conformance.oracles.call import Call, Expected, oracle
from op_registry.conformance.oracles.engine import Group, groups, map_groups, slices


@oracle("_softmax_backward_data", "_log_softmax_backward_data")
def softmax_backward(c: Call) -> Expected:
    """The formula on each slice without its invalid elements; an invalid gradient counts as zero."""
    grad, output = c["grad_output"], c["output"]
    is_log = c.name.startswith("_log")
    incoming = grad.filled(0).reshape(-1)

    def one(group: Group) -> Tensor:
        (y,), g = group.values, incoming[group.flat]
        return g - y.exp() * g.sum() if is_log else y * (g - (y * g).sum())

    each = groups([output], slices(output.shape, c.dims(output.ndim)))
    result: Expected = map_groups(each, one, output.data, output.mask)
    return Expected(result.data.to(c["input_dtype"]), output.mask)


@oracle("max_pool2d_with_indices_backward")
def max_pool_backward(c: Call) -> Expected:
    """Every gradient is added to the element of its plane that was the maximum."""
    grad, x, indices = c["grad_output"], c["self"], c["indices"]
    plane_size, windows = x.shape[-1] * x.shape[-2], grad.shape[-1] * grad.shape[-2]
    planes: list[Tensor] = []
    for plane_grad, maxima, known in zip(
        grad.data.reshape(-1, windows),
        indices.data.reshape(-1, windows),
        (grad.mask & indices.mask).reshape(-1, windows),
        strict=True,
    ):
        plane = torch.zeros(plane_size, dtype=plane_grad.dtype)
        planes.append(plane.index_add(0, maxima[known], plane_grad[known]))
    data = torch.stack(planes).reshape(x.shape) if planes else torch.zeros(x.shape, dtype=x.data.dtype)
    return Expected(data, x.mask)
