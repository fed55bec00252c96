"""Backward operators of embeddings and masked_scatter, called directly; laws/derivatives.py states the law."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from op_registry.authoring import (
    DERIVATIVE,
    Dense,
    MaskedSemanticsError,
    bind_by_name,
    known_all_valid,
    masked_rule,
    packet_name,
)

aten = torch.ops.aten


@masked_rule(aten.embedding_dense_backward.default, category=DERIVATIVE)
def embedding_dense_backward(
    grad_output: Dense, indices: Dense, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Dense:
    """Each row gets the sum of its copies' gradients; invalid indices point to an extra row, which is dropped."""
    rows = num_weights if indices.validity is None else num_weights + 1
    safe = indices.filled(num_weights)
    table = aten.embedding_dense_backward(grad_output.filled(0), safe, rows, padding_idx, scale_grad_by_freq)
    return Dense(table if rows == num_weights else table[:num_weights])


@masked_rule(
    aten._embedding_bag_backward.default,
    aten._embedding_bag_dense_backward.default,
    aten._embedding_bag_per_sample_weights_backward.default,
    category=DERIVATIVE,
    takes_op=True,
)
def _embedding_bag_backward(op: OpOverload, *args: Any, **kwargs: Any) -> Dense:
    """Each row (or per-sample weight) gets the gradients of the bags that contain it."""
    arguments = bind_by_name(op, args, kwargs)
    if arguments.get("sparse"):
        raise MaskedSemanticsError(
            f"{packet_name(op)} with sparse=True: its gradient cannot be stored sparsely yet. Use sparse=False."
        )
    for name in ("indices", "offsets", "offset2bag", "bag_size", "maximum_indices"):
        if name in arguments and not known_all_valid(arguments[name]):
            raise MaskedSemanticsError(
                f"{packet_name(op)} has no meaning where {name} (of shape {tuple(arguments[name].shape)}) is partly "
                "invalid: it is unknown which rows are in which bag. Let autograd differentiate embedding_bag, or fill "
                "it first with x.to_tensor(value)."
            )
    return Dense(
        op(**{name: value.filled(0) if isinstance(value, Dense) else value for name, value in arguments.items()})
    )


@masked_rule(aten.masked_scatter_backward.default, category=DERIVATIVE)
def masked_scatter_backward(grad_output: Dense, mask: Dense, sizes: Sequence[int]) -> Dense:
    """For `source`: the gradient's elements where `mask` is True, in order, then zeros."""
    return Dense(aten.masked_scatter_backward(grad_output.filled(0), mask.filled(False), sizes))
