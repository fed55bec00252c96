"""numpy.ma's masked arrays: what is masked there is invalid here."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor


def parts_of_masked_array(data: object) -> tuple[object, Tensor | None]:
    """The array and the mask, True where valid, of a masked array of NumPy; anything else as it is, without a mask.

    The array shares memory with the masked array. NumPy is not imported: without it there are no such arrays.
    """
    numpy_ma: Any = sys.modules.get("numpy.ma")
    if numpy_ma is None or not isinstance(data, numpy_ma.MaskedArray):
        return data, None
    mask = numpy_ma.getmask(data)
    return numpy_ma.getdata(data), None if mask is numpy_ma.nomask else torch.as_tensor(~mask)
