"""Gradient formulas that torch's operator database calls: slice by slice, and maximum by maximum."""

from __future__ import annotations

import torch
from torch import Tensor

from op_registry.conformance.oracles.slots import Call, Slot, lines, oracle, scatter_back


@oracle("_softmax_backward_data", "_log_softmax_backward_data")
def softmax_backward(c: Call) -> Slot:
    """On each slice without its invalid elements; a gradient that is missing there is none."""
    grad, output = c["grad_output"], c["output"]
    log = c.name.startswith("_log")
    incoming, known = grad.data.reshape(-1), grad.mask.reshape(-1)
    values, valid = output.data.reshape(-1), output.mask.reshape(-1)
    where_to, pieces = [], []
    for at in lines(output.shape, c.dims(output.ndim)):
        kept = at[valid[at]]
        g = torch.where(known[kept], incoming[kept], 0)
        y = values[kept]
        pieces.append(g - y.exp() * g.sum() if log else y * (g - (y * g).sum()))
        where_to.append(kept)
    return Slot(scatter_back(output.data, where_to, pieces).to(c["input_dtype"]), output.mask)


@oracle("max_pool2d_with_indices_backward")
def max_pool_backward(c: Call) -> Slot:
    """Every gradient goes to the element of its plane that was the maximum."""
    grad, x, indices = c["grad_output"], c["self"], c["indices"]
    size, places = x.shape[-1] * x.shape[-2], grad.shape[-1] * grad.shape[-2]
    planes: list[Tensor] = []
    for g, at, known in zip(
        grad.data.reshape(-1, places),
        indices.data.reshape(-1, places),
        (grad.mask & indices.mask).reshape(-1, places),
        strict=True,
    ):
        plane = torch.zeros(size, dtype=g.dtype)
        for value, place, counts in zip(g, at.tolist(), known.tolist(), strict=True):
            if counts:
                plane = plane.index_add(0, torch.tensor([place]), value.reshape(1))
        planes.append(plane)
    data = torch.stack(planes).reshape(x.shape) if planes else torch.zeros(x.shape, dtype=x.data.dtype)
    return Slot(data, x.mask)
