"""Masked tensors for PyTorch: a tensor subclass that carries a mask (True = valid) through every operator."""

from masked_dispatch import dispatch as _dispatch
from masked_dispatch import functional
from masked_dispatch import library as _library
from masked_dispatch.construct import as_masked_tensor, from_lengths, from_nan, is_masked_tensor, masked_tensor
from masked_dispatch.tensor import MaskedTensor
from op_registry import InvalidValueError, MaskedSemanticsError, registry

_library.install()
_dispatch.install()

__all__ = [
    "InvalidValueError",
    "MaskedSemanticsError",
    "MaskedTensor",
    "as_masked_tensor",
    "from_lengths",
    "from_nan",
    "functional",
    "is_masked_tensor",
    "masked_tensor",
    "registry",
]
