"""Doors to xarray, which has no masks: NaN is how it says missing. What cannot be said so is refused."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from masked_dispatch.interop.crossing import as_masked, leaving
from masked_dispatch.interop.numpy_arrays import tensor_of_array
from masked_dispatch.tensor.masked_tensor import MaskedTensor


def from_xarray(data: xr.DataArray) -> MaskedTensor:
    """A DataArray as a masked tensor of its shape and dtype, invalid where it `isnull()`: where it is NaN.

    Values are shared where torch can share them. Dimensions, coordinates, name and attributes are not kept; hand them
    back with ``to_xarray(x, data.dims, data.coords, …)``.

    Raises TypeError for a Dataset, and for values that are no numbers.
    """
    if not isinstance(data, xr.DataArray):
        raise TypeError(
            f"from_xarray takes a DataArray, not a {type(data).__name__}. Of a Dataset, make a tensor of each "
            "variable: {name: from_xarray(array) for name, array in dataset.items()}"
        )
    values = tensor_of_array(data.to_numpy())
    return as_masked(values, torch.from_numpy(~np.array(data.isnull().to_numpy())))


def to_xarray(
    x: Tensor,
    dims: Sequence[Hashable] | None = None,
    coords: Mapping[Any, Any] | None = None,
    name: Hashable | None = None,
    attrs: Mapping[Any, Any] | None = None,
) -> xr.DataArray:
    """A copy as a DataArray, NaN where invalid; the other arguments are those of xarray.DataArray.

    Raises RuntimeError if `x` requires grad; TypeError if it is not on the CPU or NumPy does not have its dtype;
    ValueError where NaN cannot say it: for invalid elements of integers or bool, and for valid NaN.
    """
    values, valid = leaving(x, "xarray")
    invalid = valid.numel() - int(valid.sum())
    if invalid and not (values.is_floating_point() or values.is_complex()):
        raise ValueError(
            f"xarray marks what is missing by NaN, which {values.dtype} does not have, and {invalid} elements of a "
            f"tensor of shape {tuple(x.shape)} are invalid: pass x.double(), or x.to_tensor(fill)"
        )
    nans = int((values.isnan() & valid).sum())
    if nans:
        raise ValueError(
            f"xarray marks what is missing by NaN, and {nans} valid elements of a tensor of shape {tuple(x.shape)} are "
            "NaN: they would become missing. To let them, pass masked_dispatch.missing.nan_to_invalid(x)"
        )
    if invalid:
        values = torch.where(valid, values, torch.nan)
    return xr.DataArray(values.numpy().copy(), coords=coords, dims=dims, name=name, attrs=attrs)
