"""Convert from and to numpy.ma, and convert NumPy arrays to tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from masked_dispatch.interop.crossing import as_masked, takes
from masked_dispatch.interop.protocols import masked_array_of
from masked_dispatch.tensor.masked_tensor import MaskedTensor

AnyArray = np.ndarray[Any, np.dtype[Any]]


@takes(
    array=(np.generic, np.ndarray), instead="pass numpy.ma.array(array, mask=...), or use masked_tensor(array, mask)"
)
def from_numpy_masked(array: AnyArray) -> MaskedTensor:
    """Convert a masked or plain NumPy array to a masked tensor of the same shape and dtype.

    Masked elements (mask=True) become invalid. The result shares the values if torch can share them, and otherwise
    copies them (negative strides, foreign byte order, read-only memory); it copies the mask. It drops the array's
    fill_value: pass that to `to_numpy_masked`.

    Raises TypeError for a dtype that torch lacks.
    """
    mask = np.ma.getmask(array)
    values = tensor_of_array(np.ma.getdata(array))
    return as_masked(values, None if mask is np.ma.nomask else ~torch.from_numpy(np.array(mask)))


@takes(x=Tensor)
def to_numpy_masked(x: Tensor, fill_value: object = None) -> np.ma.MaskedArray[Any, np.dtype[Any]]:
    """Copy a tensor to a masked NumPy array of the same shape and dtype; its filled() uses `fill_value`.

    Invalid elements become masked. Their values are NaN, or 0 if the dtype has no NaN, so a NumPy function that ignores
    the mask does not return a plausible result.

    Raises RuntimeError if `x` requires grad, TypeError if it is not on the CPU or NumPy lacks its dtype.
    """
    return masked_array_of(x, np.ma, fill_value)


def tensor_of_array(array: AnyArray) -> Tensor:
    """Return a tensor that shares the array's memory if torch can, and copies it otherwise."""
    if array.dtype.kind not in "biufc":
        raise TypeError(
            f"an array of dtype {array.dtype} and shape {array.shape} has no equivalent in torch; convert it, "
            "array.astype(...), to bool, integers, floating point or complex numbers"
        )
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    itemsize = array.dtype.itemsize
    if not array.flags.writeable or any(stride < 0 or stride % itemsize for stride in array.strides):
        array = array.copy()
    return torch.from_numpy(array)
