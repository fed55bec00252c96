"""The gradient formulas of the norms, called by hand.

The law is in laws/derivatives.py. Statistics are recomputed from the valid elements of the input; of what the
forward operator saved only `rstd` is read, to recover `eps`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    DERIVATIVE,
    Bound,
    Dense,
    DenseSlices,
    by_rule,
    derivative,
    fill_where_invalid,
    intersect,
    masked_rule,
    moments,
    nonzero_count,
    opaque,
    requested_gradients,
    valid_in_all,
    vjp,
)
from op_registry.ops.normalization.channels import Channels, by_own_statistics
from op_registry.ops.normalization.norms import affine, standardised, with_validity

aten = torch.ops.aten


def saved_eps(x: Dense, dims: tuple[int, ...], rstd: Dense) -> Tensor:
    """The eps that was added to the variance of each slice, recovered from the saved `rstd`."""
    m = moments(with_validity(x.like(x.data.detach())), DenseSlices(dims))
    variance = m.square / nonzero_count(m.count)
    return rstd.filled(1).detach().reshape(variance.shape).to(variance.dtype) ** -2 - variance


@masked_rule(aten.native_layer_norm_backward.default, category=DERIVATIVE, takes_call=True, torch_if_valid=True)
def native_layer_norm_backward(c: Bound) -> tuple[Dense | None, ...]:
    """Where the saved statistics are invalid, the whole slice is."""
    dims = tuple(range(c.input.ndim - len(c.normalized_shape), c.input.ndim))
    x = c.input.masked_by(valid_in_all(c.mean, c.rstd))
    eps = saved_eps(x, dims, c.rstd)

    def normalised(x: Dense, weight: Dense | None, bias: Dense | None) -> Dense:
        values, _, _ = standardised(x, DenseSlices(dims), eps)
        return Dense(affine(values, weight, bias), valid_in_all(x, weight, bias))

    return requested_gradients(vjp(normalised, (x, c.weight, c.bias), c.grad_out), c.output_mask)


@masked_rule(aten.native_group_norm_backward.default, category=DERIVATIVE, takes_call=True, torch_if_valid=True)
def native_group_norm_backward(c: Bound) -> tuple[Dense | None, ...]:
    """As native_layer_norm_backward, by groups of channels. The operator takes no bias: it counts as all valid."""
    statistics_validity = valid_in_all(c.mean, c.rstd)
    if statistics_validity is not None:
        by_channel = statistics_validity.expand(c.N, c.group).repeat_interleave(c.C // c.group, 1)
        statistics_validity = by_channel.reshape(c.N, c.C, *[1] * (c.input.ndim - 2))
    x = c.input.masked_by(statistics_validity)
    groups = x.map(lambda t: t.reshape(c.N, c.group, c.C // c.group, *x.shape[2:]))
    eps = saved_eps(groups, tuple(range(2, groups.ndim)), c.rstd)
    bias = Dense(x.data.new_zeros(c.C))

    def normalised(x: Dense, weight: Dense | None, bias: Dense | None) -> Any:
        channels = Channels(x)
        return by_own_statistics(channels, *channels.groups(c.group), weight, bias, eps, x.dtype)[0]

    return requested_gradients(vjp(normalised, (x, c.weight, bias), c.grad_out), c.output_mask)


@masked_rule(
    aten.native_batch_norm_backward.default,
    aten.batch_norm_backward.default,
    category=DERIVATIVE,
    takes_call=True,
    torch_if_valid=True,
)
def native_batch_norm_backward(c: Bound) -> tuple[Dense | None, ...]:
    """By channel: with the batch's statistics in training, with the running ones otherwise."""
    x, training = c.input, c["train" if "train" in c else "update"]
    weight = Dense(x.data.new_ones(x.shape[1])) if c.weight is None else c.weight
    bias = Dense(x.data.new_zeros(x.shape[1]))
    statistics = (None, None) if training else (c.running_mean, c.running_var)

    def normalised(x: Dense, weight: Dense, bias: Dense) -> Any:
        op: OpOverload = aten.native_batch_norm.default
        return by_rule(op, x, weight, bias, *statistics, training, 0.0, c.eps)[0]

    return requested_gradients(vjp(normalised, (x, weight, bias), c.grad_out), c.output_mask)


_weight_norm_interface_backward = derivative(
    aten._weight_norm_interface_backward.default,
    of=aten._weight_norm_interface.default,
    by=("v", "g"),
    v=lambda bound: bound["saved_v"],
    g=lambda bound: bound["saved_g"],
)


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
_masked_softmax = opaque(aten._masked_softmax.default, aten._masked_softmax_backward.default)
