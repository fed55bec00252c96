"""Backward operators that torch's operator database calls."""

from __future__ import annotations

import torch
from torch import Tensor

from op_registry.conformance.oracles.call import Call, Expected, oracle, valid
from op_registry.conformance.oracles.engine import Group, groups, map_groups, slices
from op_registry.conformance.oracles.positions import write
from op_registry.conformance.oracles.windows import in_planes


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
    known = grad.mask & indices.mask
    targets = in_planes(indices, 2, x.shape[-1] * x.shape[-2])
    zeros = valid(torch.zeros(x.shape, dtype=grad.data.dtype))
    return Expected(write(zeros, targets[known], grad.map(lambda t: t[known]), "sum").data, x.mask)
