"""Convert from and to pandas Series and DataFrames of nullable dtypes, whose NA elements are invalid here."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from masked_dispatch.interop.crossing import OF_NUMPY, Parts, as_masked, leaving, stacked, takes
from masked_dispatch.interop.numpy_arrays import tensor_of_array
from masked_dispatch.tensor.masked_tensor import MaskedTensor

# pandas has no nullable dtype for the excluded ones.
NULLABLE = OF_NUMPY - {torch.float16, torch.complex64, torch.complex128}


@takes(
    data=(pd.Series, pd.DataFrame, pd.Index, pd.api.extensions.ExtensionArray),
    instead="pass pandas.Series(data), where None is missing",
)
def from_pandas(data: pd.Series | pd.DataFrame, dtype: torch.dtype | None = None) -> MaskedTensor:
    """Convert a Series, Index or array of pandas to a masked tensor of shape (n,), a DataFrame to one of (n, columns).

    data   bool, integers or floating point numbers: nullable dtypes (Int64, Float32, boolean …), those of pyarrow
           (int64[pyarrow] …), or NumPy's. Missing elements (`isna()`) become invalid. So NaN is invalid in a float64
           column, where it stands for NA, and a value in a Float64 column
    dtype  the dtype of the result, required for a DataFrame whose columns have several dtypes

    The result copies the values and drops index and names; restore them with ``to_pandas(x, index=data.index, …)``.

    Raises TypeError for columns of other dtypes, or of several without `dtype`.
    """
    if isinstance(data, pd.DataFrame):
        columns = {repr(name): _parts(data.iloc[:, i], f"column {name!r}") for i, name in enumerate(data.columns)}
        if len(columns) < data.shape[1]:
            columns = {f"number {i}": _parts(data.iloc[:, i], f"column number {i}") for i in range(data.shape[1])}
        each = "{name: from_pandas(frame[name]) for name in frame}"
        return stacked(columns, len(data), dtype, f"from_pandas(frame, dtype=torch.float64), or convert {each}")
    name = getattr(data, "name", None)
    values, valid = _parts(data, "this Series" if name is None else f"column {name!r}")
    return as_masked(values if dtype is None else values.to(dtype), valid)


@takes(x=Tensor)
def to_pandas(
    x: Tensor,
    index: Iterable[Hashable] | None = None,
    columns: Iterable[Hashable] | None = None,
    name: Hashable | None = None,
) -> Any:
    """Copy a tensor to a Series (shape (n,)) or DataFrame (shape (n, columns)) of nullable dtype, NA where invalid.

    index    the row labels; `columns` labels a DataFrame, `name` a Series: pandas' types or tensors of labels

    Raises RuntimeError if `x` requires grad; TypeError if it is not on the CPU, or if its dtype has no nullable
    counterpart (complex, half precision); ValueError for other dimensions.
    """
    values, valid = leaving(x, "pandas, in its nullable dtypes,", NULLABLE)
    index, columns = (labels.tolist() if isinstance(labels, Tensor) else labels for labels in (index, columns))
    if x.ndim == 1:
        if columns is not None:
            raise ValueError(
                f"a tensor of shape {tuple(x.shape)} becomes a Series, which has no columns: pass name=..."
            )
        return pd.Series(_nullable(values, valid), index=index, name=name)
    if x.ndim != 2:
        raise ValueError(
            f"a tensor of shape {tuple(x.shape)} has {x.ndim} dimensions; a Series has 1 and a DataFrame 2. Choose "
            "rows and columns: x.flatten(1), or x[:, i]"
        )
    if name is not None:
        raise ValueError(
            f"a tensor of shape {tuple(x.shape)} becomes a DataFrame, which has no name: pass columns=[...]"
        )
    labels = pd.RangeIndex(len(x)) if index is None else index
    frame = pd.DataFrame({i: _nullable(values[:, i], valid[:, i]) for i in range(x.shape[1])}, index=labels)
    if columns is not None:
        frame.columns = columns
    return frame


def _nullable(values: Tensor, valid: Tensor) -> Any:
    """Build a nullable pandas array from copies of the parts."""
    kind = pd.arrays.FloatingArray if values.is_floating_point() else pd.arrays.IntegerArray
    if values.dtype is torch.bool:
        kind = pd.arrays.BooleanArray
    return kind(values.numpy().copy(), ~valid.numpy())


def _parts(column: Any, which: str) -> Parts:
    """Copy the values and the mask of one column; errors refer to it as `which`."""
    dtype = column.dtype
    stored = getattr(dtype, "numpy_dtype", dtype)
    if isinstance(dtype, pd.CategoricalDtype):
        refuse(which, dtype, "number its categories: series.cat.codes, which is -1 where it is missing")
    if isinstance(dtype, pd.SparseDtype):
        refuse(which, dtype, "store it densely: series.sparse.to_dense()")
    if getattr(dtype, "kind", "O") in "mM":
        refuse(which, dtype, "make it a number: (series - series.min()).dt.total_seconds()")
    if not isinstance(stored, np.dtype) or stored.kind not in "biufc":
        refuse(
            which,
            dtype,
            "convert it: pd.to_numeric(series), or series.convert_dtypes() for Python's objects; number labels: "
            "pd.factorize(series)[0], which is -1 where one is missing; or leave it out: frame.select_dtypes('number')",
        )
    missing = np.array(column.isna(), dtype=bool)
    if isinstance(dtype, np.dtype):
        values = np.array(column)
    else:
        values = np.array(column.to_numpy(dtype=stored, na_value=stored.type(0)))
    return Parts(tensor_of_array(values), torch.from_numpy(~missing))


def refuse(which: str, dtype: object, instead: str) -> None:
    """Raise for a column that holds no numbers."""
    raise TypeError(f"{which} of dtype {dtype} has no equivalent in torch; {instead}")
