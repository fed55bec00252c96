"""torch.masked's reductions take masked tensors: `torch.masked.mean(x, mask=m)` means what its operator means.

They are Python functions, which dispatch does not see. So this library replaces them with wrappers that call torch's
function unless an argument is a masked tensor. Code that imported one by name before this library keeps torch's.
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
    """Wrap torch's `function`: `operator` is called instead if the input or `mask=` is a masked tensor."""

    @functools.wraps(function)
    def reduced(input: Tensor, *args: Any, mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        if isinstance(input, MaskedTensor) or isinstance(mask, MaskedTensor):
            result: Tensor = operator(input, *args, mask=mask, **kwargs)
            return result
        return function(input, *args, mask=mask, **kwargs)

    return reduced


def install() -> None:
    """Replace the functions: called once, when the package is imported."""
    for name, operator in OPERATORS.items():
        setattr(torch.masked, name, taking_masked_tensors(getattr(torch.masked, name), operator))
