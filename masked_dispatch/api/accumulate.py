"""The sum of the valid contributions, where elementwise arithmetic requires every operand to be valid."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulate(*tensors: Tensor) -> Tensor:
    """The sum of the valid contributions, valid where there is at least one; differentiable.

    tensors  one or more, masked or plain (a plain one contributes everywhere), of shapes that broadcast together

    Returns a masked tensor with the shape and dtype of their sum by torch.add (bool: "or"); a plain one if all are
    plain. Half-precision contributions are summed in float32 and rounded once.

    Raises TypeError for arguments that are not tensors, RuntimeError for shapes that do not broadcast.
    """
    if not tensors:
        raise TypeError("accumulate takes at least one tensor: the shape of an empty sum is not known")
    for position, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"accumulate takes tensors; argument {position} is {tensor!r}, a {type(tensor).__name__}. "
                "Unpack a list with accumulate(*tensors), and convert a number with torch.tensor(number)"
            )
    return torch.ops.masked_dispatch.accumulate(tensors)
