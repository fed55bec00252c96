"""Convert from and to xarray, which marks missing elements with NaN; refuse tensors that NaN cannot represent."""

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
    """Convert a DataArray to a masked tensor of its shape and dtype, invalid where `isnull()` (at NaN).

    An array that was read without decoding (``mask_and_scale=False``) still lists the values for missing elements in
    its attributes `_FillValue` and `missing_value` (CF conventions): elements with these values become invalid too. The
    conversion does not scale or offset the stored values.

    The result shares the values if torch can share them. It drops dimensions, coordinates, name and attributes; restore
    them with ``to_xarray(x, data.dims, data.coords, …)``.

    Raises TypeError for a Dataset, for values that are not numbers, and for such attributes that are not numbers.
    """
    array = data.to_numpy()
    values = tensor_of_array(array)
    missing = np.array(data.isnull().to_numpy())
    for name in ("_FillValue", "missing_value"):
        if name in data.attrs:
            missing |= np.isin(array, numbers_of(data.attrs[name], array.dtype, name))
    return as_masked(values, torch.from_numpy(~missing))


def numbers_of(value: object, dtype: np.dtype[Any], name: str) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the numbers of an attribute, rounded to the dtype of a floating point array."""
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
    """Copy a tensor to a DataArray, NaN where invalid; xarray.DataArray takes the other arguments.

    Raises RuntimeError if `x` requires grad; TypeError if it is not on the CPU or NumPy lacks its dtype; ValueError if
    NaN cannot mark invalid elements: for invalid integers or bool, and for valid NaN.
    """
    values, valid = leaving(x, "xarray")
    invalid = valid.numel() - int(valid.sum())
    if invalid and not (values.is_floating_point() or values.is_complex()):
        raise ValueError(
            f"xarray marks missing values by NaN, which {values.dtype} does not have, and {invalid} elements of a "
            f"tensor of shape {tuple(x.shape)} are invalid: pass x.double(), or x.to_tensor(fill)"
        )
    nans = int((values.isnan() & valid).sum())
    if nans:
        raise ValueError(
            f"xarray marks missing values by NaN, and {nans} valid elements of a tensor of shape {tuple(x.shape)} "
            "are NaN: they would become missing. To allow that, pass masked_dispatch.missing.nan_to_invalid(x)"
        )
    if invalid:
        values = torch.where(valid, values, torch.nan)
    return xr.DataArray(values.numpy().copy(), coords=coords, dims=dims, name=name, attrs=attrs)
