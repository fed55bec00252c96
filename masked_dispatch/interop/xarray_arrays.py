"""Doors to xarray, which has no masks: NaN is how it says missing. What cannot be said so is refused."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from masked_dispatch.interop.crossing import as_masked, leaving, takes
from masked_dispatch.interop.numpy_arrays import tensor_of_array
from masked_dispatch.tensor.masked_tensor import MaskedTensor


@takes(
    data=xr.DataArray,
    instead="pass xarray.DataArray(data); of a Dataset, make a tensor of each variable: {name: from_xarray(array) for "
    "name, array in dataset.items()}",
)
def from_xarray(data: xr.DataArray) -> MaskedTensor:
    """A DataArray as a masked tensor of its shape and dtype, invalid where it `isnull()`: where it is NaN.

    An array that was read without decoding (``mask_and_scale=False``) still says in its attributes which values stand
    for what is missing, `_FillValue` and `missing_value` of the CF conventions: these are invalid too. Its values stay
    as they are stored, neither scaled nor offset.

    Values are shared where torch can share them. Dimensions, coordinates, name and attributes are not kept; hand them
    back with ``to_xarray(x, data.dims, data.coords, …)``.

    Raises TypeError for a Dataset, for values that are no numbers, and for attributes that name none.
    """
    array = data.to_numpy()
    values = tensor_of_array(array)
    missing = np.array(data.isnull().to_numpy())
    for name in ("_FillValue", "missing_value"):
        if name in data.attrs:
            missing |= np.isin(array, numbers_of(data.attrs[name], array.dtype, name))
    return as_masked(values, torch.from_numpy(~missing))


def numbers_of(value: object, dtype: np.dtype[Any], name: str) -> np.ndarray[Any, np.dtype[Any]]:
    """The numbers of an attribute, one or several, in the digits of an array of floating point numbers."""
    numbers = np.atleast_1d(np.asarray(value))
    if numbers.dtype.kind not in "biufc":
        raise TypeError(
            f"from_xarray takes numbers as the attribute {name!r}, which says what stands for missing values, not "
            f"{value!r}: decode the array, xarray.decode_cf(array.to_dataset(name='x'))['x'], or leave the attribute "
            f"out, array.drop_attrs()"
        )
    return numbers.astype(dtype) if dtype.kind in "fc" else numbers


@takes(x=Tensor)
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
