"""Replace torch.masked's reductions, so that they accept masked tensors: `torch.masked.mean(x, mask=m)`.

The reductions are Python functions, which dispatch does not see; each replacement calls the operator of its name. Code
that imported a reduction by name before this library keeps torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from masked_dispatch.replacements.replacing import replace
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry.ops.reductions.torch_masked import OPERATORS


def reduced_by(operator: OpOverload) -> Callable[..., Tensor]:
    """Return a replacement for torch's function that calls the operator."""
    return lambda original, *args, **kwargs: operator(*args, **kwargs)


def is_of_masked(input: Tensor, *args: Any, mask: Tensor | None = None, **kwargs: Any) -> bool:
    """Return whether the input or `mask=` is a masked tensor."""
    return isinstance(input, MaskedTensor) or isinstance(mask, MaskedTensor)


def install() -> None:
    """Replace the functions; the package calls this once, on import."""
    for name, operator in OPERATORS.items():
        replace(torch.masked, name, reduced_by(operator), is_of_masked)
