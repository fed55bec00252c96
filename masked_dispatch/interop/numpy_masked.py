"""Split and build numpy.ma's masked arrays, whose masked elements are invalid here.

This module does not import NumPy: a program without NumPy has no such arrays.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from masked_dispatch.interop.crossing import leaving


def parts_of_masked_array(data: object) -> tuple[object, Tensor | None]:
    """Return the array and the mask (True where valid) of a masked NumPy array; return other values without a mask.

    The returned array shares memory with the masked array.
    """
    numpy_ma: Any = sys.modules.get("numpy.ma")
    if numpy_ma is None or not isinstance(data, numpy_ma.MaskedArray):
        return data, None
    mask = numpy_ma.getmask(data)
    return numpy_ma.getdata(data), None if mask is numpy_ma.nomask else torch.as_tensor(~mask)


def masked_array_of(tensor: Tensor, numpy_ma: Any, fill_value: object = None) -> Any:
    """Build a masked array from copies of the values and the mask, with NaN (or 0) under the mask."""
    values, valid = leaving(tensor, "NumPy")
    if values.is_floating_point() or values.is_complex():
        values = torch.where(valid, values, torch.nan)
    return numpy_ma.MaskedArray(values.numpy(), mask=~valid.numpy(), fill_value=fill_value, copy=True)
