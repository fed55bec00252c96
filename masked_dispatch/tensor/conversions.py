"""Calls of the operators whose results are stored sparsely, which torch.export records otherwise than torch.compile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from op_registry.sparse.layout import DENSE
from op_registry.sparse.layout_registry import layout_named


def converted(operator: str, *args: Any, layout: str, block: Sequence[int] | None) -> Any:
    """The result of ``torch.ops.masked_dispatch.<operator>``, of the shape of the first argument, stored in a layout.

    How much is stored is a size of its own in a graph. torch binds it to the result; for a tensor inside of a masked
    tensor by an attribute, which its verifier of exported programs refuses. In an export the operator therefore returns
    plain tensors, of which another one makes the masked tensor.
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
