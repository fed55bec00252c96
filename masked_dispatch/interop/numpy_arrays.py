"""Doors to numpy.ma, and NumPy's arrays as tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from masked_dispatch.interop.crossing import as_masked, takes
from masked_dispatch.interop.numpy_masked import masked_array_of
from masked_dispatch.tensor.masked_tensor import MaskedTensor

AnyArray = np.ndarray[Any, np.dtype[Any]]


@takes(array=(np.generic, np.ndarray), instead="pass numpy.ma.array(array, mask=…), or use masked_tensor(array, mask)")
def from_numpy_masked(array: AnyArray) -> MaskedTensor:
    """A masked array of NumPy, or a plain one, as a masked tensor of the same shape and dtype.

    What is masked there (mask=True) is invalid here. The values are shared where torch can share them, copied where it
    cannot (negative strides, foreign byte order, read-only memory); the mask is copied. The array's fill_value is not
    kept: pass it to `to_numpy_masked`.

    Raises TypeError for a dtype that torch does not have.
    """
    mask = np.ma.getmask(array)
    values = tensor_of_array(np.ma.getdata(array))
    return as_masked(values, None if mask is np.ma.nomask else ~torch.from_numpy(np.array(mask)))


@takes(x=Tensor)
def to_numpy_masked(x: Tensor, fill_value: object = None) -> np.ma.MaskedArray[Any, np.dtype[Any]]:
    """A copy as a masked array of NumPy, of the same shape and dtype; `fill_value` is what its filled() gives.

    What is invalid is masked. Under the mask stands NaN, where the dtype has it, or else 0, so that what a function of
    NumPy makes of an array whose mask it ignores does not pass for a result.

    Raises RuntimeError if `x` requires grad, TypeError if it is not on the CPU or NumPy does not have its dtype.
    """
    return masked_array_of(x, np.ma, fill_value)


def tensor_of_array(array: AnyArray) -> Tensor:
    """A tensor that shares memory with the array where torch can, or else has a copy."""
    if array.dtype.kind not in "biufc":
        raise TypeError(
            f"an array of dtype {array.dtype} and shape {array.shape} does not hold numbers that torch has; convert "
            "it, array.astype(…), to bool, integers, floating point or complex numbers"
        )
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    itemsize = array.dtype.itemsize
    if not array.flags.writeable or any(stride < 0 or stride % itemsize for stride in array.strides):
        array = array.copy()
    return torch.from_numpy(array)
