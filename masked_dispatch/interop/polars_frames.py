"""Convert from and to polars, whose null elements are invalid here; NaN is a value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from masked_dispatch.interop.crossing import OF_NUMPY, Parts, as_masked, leaving, stacked, takes
from masked_dispatch.interop.numpy_arrays import tensor_of_array
from masked_dispatch.tensor.masked_tensor import MaskedTensor

TYPES = (
    *(pl.Boolean, pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.UInt8, pl.UInt16, pl.UInt32, pl.UInt64),
    *(pl.Float32, pl.Float64),
)
POLARS = OF_NUMPY - {torch.float16, torch.complex64, torch.complex128}


@takes(data=(pl.Series, pl.DataFrame), instead="pass polars.Series(data), where None is null")
def from_polars(data: pl.Series | pl.DataFrame, dtype: torch.dtype | None = None) -> MaskedTensor:
    """Copy a Series to a masked tensor of shape (n,), or a DataFrame to one of shape (n, columns).

    data   bool, integers or floating point numbers
    dtype  the dtype of the result, required for a DataFrame whose columns have several dtypes

    Raises TypeError for columns of other dtypes, or of several without `dtype`.
    """
    if isinstance(data, pl.DataFrame):
        columns = {repr(series.name): _parts(series) for series in data.get_columns()}
        each = "{name: from_polars(frame[name]) for name in frame.columns}"
        return stacked(columns, data.height, dtype, f"from_polars(frame, dtype=torch.float64), or convert {each}")
    values, valid = _parts(data)
    return as_masked(values if dtype is None else values.to(dtype), valid)


@takes(x=Tensor)
def to_polars(x: Tensor, names: str | Sequence[str] | None = None) -> Any:
    """Copy a tensor to a Series (shape (n,)) or DataFrame (shape (n, columns)); `names` names the Series or columns.

    Invalid elements become null.

    Raises RuntimeError if `x` requires grad; TypeError if it is not on the CPU, or has a dtype that polars lacks;
    ValueError for other dimensions, or names that do not match.
    """
    values, valid = leaving(x, "polars", POLARS)
    if x.ndim == 1 and (names is None or isinstance(names, str)):
        return _series(names or "", values, valid)
    if x.ndim == 2 and names is not None and not isinstance(names, str) and len(names) == x.shape[1]:
        return pl.DataFrame([_series(name, values[:, i], valid[:, i]) for i, name in enumerate(names)])
    raise ValueError(
        f"a tensor of shape {tuple(x.shape)} with names={names!r}: a Series has one dimension and one name, a "
        "DataFrame has two dimensions and a name for each column, to_polars(x, names=[...])"
    )


def _series(name: str, values: Tensor, valid: Tensor) -> pl.Series:
    column, is_valid = pl.Series(name, values.numpy().copy()), pl.Series(valid.numpy().copy())
    return pl.select(pl.when(is_valid).then(column).alias(name)).to_series()


def _parts(series: pl.Series) -> Parts:
    """Copy the values and the mask of one column."""
    if series.dtype not in TYPES:
        raise TypeError(
            f"column {series.name!r} of dtype {series.dtype} has no equivalent in torch; convert it, "
            "series.cast(pl.Float64), or number its values, series.rank('dense')"
        )
    filled = series.fill_null(value=False if series.dtype == pl.Boolean else 0)
    return Parts(tensor_of_array(np.array(filled.to_numpy())), torch.from_numpy(~np.array(series.is_null().to_numpy())))
