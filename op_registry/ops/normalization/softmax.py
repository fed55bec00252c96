"""Softmax and its logarithm.

Law: over the valid elements of the slice; valid where the input is. An invalid element is filled with -inf: it has
probability 0 and gets no gradient. In eager mode a slice without valid elements is filled with 0, so that neither its
hidden values nor their gradients are NaN.

torch's own kernel runs on the filled data, with its autocast policy and its derivatives.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from op_registry.authoring import (
    DERIVATIVE,
    NORMALIZATION,
    Dense,
    Slices,
    fill_where_invalid,
    intersect,
    masked_rule,
    masked_slices,
    opaque,
)
from op_registry.records.slices import filled_for_exp_alone, slices_on_all

aten = torch.ops.aten


@masked_slices(
    aten.softmax.int,
    aten.log_softmax.int,
    aten._safe_softmax,
    category=NORMALIZATION,
    dims=Slices("each"),
)
def softmax(op: OpOverload, x: Dense, dim: int, dtype: torch.dtype | None = None) -> Dense:
    """The input is cast to `dtype` first, as in torch, so that -inf exists for integers too."""
    data = x.data if dtype is None else x.data.to(dtype)
    return _over_valid(op, x.like(data), dim, dtype)


@masked_slices(aten._softmax, aten._log_softmax, category=NORMALIZATION, dims=Slices("each"))
def _softmax(op: OpOverload, x: Dense, dim: int, half_to_float: bool) -> Dense:
    """The operator that softmax decomposes into."""
    return _over_valid(op, x, dim, half_to_float)


def _over_valid(op: OpOverload, x: Dense, dim: int, dtype_option: torch.dtype | bool | None) -> Dense:
    if not x.dtype.is_floating_point:
        op(x.data, dim, dtype_option)  # raises torch's error
    x = slices_on_all(x, dim)
    return x.like(op(filled_for_exp_alone(x, dim), dim, dtype_option))


@masked_rule(
    aten._softmax_backward_data.default, aten._log_softmax_backward_data.default, category=DERIVATIVE, takes_op=True
)
def _softmax_backward_data(
    op: OpOverload, grad_output: Dense, output: Dense, dim: int, input_dtype: torch.dtype
) -> Dense:
    """`output` holds the weight of each valid element in its slice; invalid elements have weight 0."""
    counted = fill_where_invalid(grad_output.data, intersect(grad_output.validity, output.validity), 0)
    return output.like(op(counted, output.filled(0), dim, input_dtype))


# A softmax with a padding mask as an argument, used inside the fused layers of torch.nn.
_masked_softmax = opaque(aten._masked_softmax.default)
