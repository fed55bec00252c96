"""Gradient formulas of look-ups, called by hand; op_registry/derivatives.py has the law."""

from __future__ import annotations

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
    opaque,
    packet_name,
)

aten = torch.ops.aten


@masked_rule(aten.embedding_dense_backward.default, category=DERIVATIVE)
def embedding_dense_backward(
    grad_output: Dense, indices: Dense, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Dense:
    """Each row gets what came to its copies; invalid indices ask for one row more, which is cut off again."""
    rows = num_weights if indices.validity is None else num_weights + 1
    asked = indices.filled(num_weights)
    table = aten.embedding_dense_backward(grad_output.filled(0), asked, rows, padding_idx, scale_grad_by_freq)
    return Dense(table if rows == num_weights else table[:num_weights])


@masked_rule(
    aten._embedding_bag_backward.default,
    aten._embedding_bag_dense_backward.default,
    aten._embedding_bag_per_sample_weights_backward.default,
    category=DERIVATIVE,
    takes_op=True,
)
def _embedding_bag_backward(op: OpOverload, *args: Any, **kwargs: Any) -> Dense:
    """Each row (or its weight in the bag) gets what came to the bags that it is in."""
    given = bind_by_name(op, args, kwargs)
    if given.get("sparse"):
        raise MaskedSemanticsError(
            f"{packet_name(op)} with sparse=True: its gradient is not stored sparsely yet. Use sparse=False."
        )
    for name in ("indices", "offsets", "offset2bag", "bag_size", "maximum_indices"):
        if name in given and not known_all_valid(given[name]):
            raise MaskedSemanticsError(
                f"{packet_name(op)} has no meaning where {name} (of shape {tuple(given[name].shape)}) is partly "
                "invalid: nothing says which rows are in which bag. Let autograd differentiate embedding_bag, or fill "
                "it first with x.to_tensor(value)."
            )
    return Dense(op(**{name: value.filled(0) if isinstance(value, Dense) else value for name, value in given.items()}))


masked_scatter_backward = opaque(aten.masked_scatter_backward.default)
