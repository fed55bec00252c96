"""torch.masked's reductions take masked tensors: `torch.masked.mean(x, mask=m)` means what its operator means.

They are Python functions, which dispatch does not see. Code that imported one by name before this library keeps
torch's.
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
    """The operator in place of torch's function."""
    return lambda original, *args, **kwargs: operator(*args, **kwargs)


def is_of_masked(input: Tensor, *args: Any, mask: Tensor | None = None, **kwargs: Any) -> bool:
    """Whether the input or `mask=` is a masked tensor."""
    return isinstance(input, MaskedTensor) or isinstance(mask, MaskedTensor)


def install() -> None:
    """Replace the functions: called once, when the package is imported."""
    for name, operator in OPERATORS.items():
        replace(torch.masked, name, reduced_by(operator), is_of_masked)
