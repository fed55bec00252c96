"""Calls of operators that return sparse storage, which torch.export and torch.compile record differently."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from op_registry.sparse.layout import DENSE, layout_named


def converted(operator: str, *args: Any, layout: str, block: Sequence[int] | None) -> Any:
    """The result of ``torch.ops.masked_dispatch.<operator>``, with the shape of the first argument, in a layout.

    In a graph the number of stored elements is a new symbol. torch binds it to the result; for an inner tensor of a
    masked tensor it does so by an attribute, which torch's verifier of exported programs refuses. In an export the
    operator therefore returns plain tensors, and another operator makes the masked tensor from them.
    """
    operators = torch.ops.masked_dispatch
    if layout == DENSE or not torch.compiler.is_exporting():
        return getattr(operators, operator)(*args)
    values, *tensors = getattr(operators, f"{operator}_pieces")(*args)
    pieces = len(layout_named(layout).piece_dims)
    dense_dims = values.ndim - (1 if block is None else 3)
    validity = tensors[pieces] if len(tensors) > pieces else None
    shape = args[0].shape
    sizes = shape[: len(shape) - dense_dims]
    return operators.from_stored(values, validity, tensors[:pieces], layout, sizes, block, None)
