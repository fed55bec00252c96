"""torch.masked's reductions take masked tensors: `torch.masked.mean(x, mask=m)` means what its operator means.

They are Python functions, which no dispatch sees; so this library puts functions of its own in their place, which hand
on to torch's whatever is not masked by it. Who has imported one by name before this library has torch's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry.ops.reductions.torch_masked import OPERATORS


def taking_masked_tensors(function: Callable[..., Tensor], operator: OpOverload) -> Callable[..., Tensor]:
    """torch's `function`, given up for `operator` where the input or `mask=` is a masked tensor."""

    @functools.wraps(function)
    def reduced(input: Tensor, *args: Any, mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        if isinstance(input, MaskedTensor) or isinstance(mask, MaskedTensor):
            result: Tensor = operator(input, *args, mask=mask, **kwargs)
            return result
        return function(input, *args, mask=mask, **kwargs)

    return reduced


def install() -> None:
    """Called once, when the package is imported."""
    for name, operator in OPERATORS.items():
        setattr(torch.masked, name, taking_masked_tensors(getattr(torch.masked, name), operator))
