"""Tensors of libraries whose device torch's C++ does not know: the classes that wrap them, and their limits."""

from __future__ import annotations

import torch
from torch import Tensor

from op_registry import MaskedSemanticsError

# By type of the data: a subclass of MaskedTensor, and the device that torch's C++ assumes for its tensors.
wrappers: dict[type, tuple[type, torch.device]] = {}


def transformed_elsewhere(tensor: Tensor) -> str:
    """The error text of a transform of masked_dispatch.functional."""
    return (
        f"the transforms of masked_dispatch.functional take no masked tensors on {tensor.device} (shape "
        f"{tuple(tensor.shape)}). Use those of the library that the device belongs to, on functions of data and mask "
        "that make the masked tensor inside, with as_masked_tensor(data, mask)."
    )


def check_stored_sparsely(values: Tensor) -> None:
    """Refuse sparse storage of such tensors, because its number of stored elements depends on data."""
    if type(values) in wrappers:
        raise MaskedSemanticsError(
            f"masked tensors on {values.device} are only stored densely: the number of elements in sparse or packed "
            f"storage ({tuple(values.shape)} here) depends on the mask, and each number would need another "
            "compilation. Keep x as it is, or store it on the CPU, x.cpu().to_layout(layout)."
        )
