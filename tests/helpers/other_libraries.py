"""Columns with missing numbers in numpy.ma, pandas, pyarrow and here, and the comparison of their answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import torch

import masked_dispatch as md

GARBAGE = 1e30
Column = list[float | None]


# --------------------------------------------------------------------------------------------- a column in each library


def ours(column: Column) -> md.MaskedTensor:
    data = torch.tensor([GARBAGE if v is None else v for v in column], dtype=torch.float64)
    return md.masked_tensor(data, torch.tensor([v is not None for v in column], dtype=torch.bool))


def in_numpy(column: Column) -> Any:
    return np.ma.array([GARBAGE if v is None else v for v in column], mask=[v is None for v in column], dtype=float)


def in_pandas(column: Column) -> Any:
    data = np.array([GARBAGE if v is None else v for v in column], dtype=float)
    return pd.Series(pd.arrays.FloatingArray(data, np.array([v is None for v in column], dtype=bool)))


def in_arrow(column: Column) -> Any:
    data = np.array([GARBAGE if v is None else v for v in column], dtype=float)
    return pa.array(data, mask=np.array([v is None for v in column], dtype=bool))


def answer(value: Any) -> Any:
    """A result of any library as a Python number or a list of them; None is missing."""
    if isinstance(value, torch.Tensor):
        if not md.is_masked_tensor(value):
            return value.tolist()
        values, valid = value.get_data().tolist(), value.get_mask().tolist()
        return (
            [v if k else None for v, k in zip(values, valid, strict=True)] if value.ndim else values if valid else None
        )
    if value is np.ma.masked or value is pd.NA:
        return None
    if isinstance(value, (pa.Scalar, pa.Array, pa.ChunkedArray)):
        return value.to_pylist() if not isinstance(value, pa.Scalar) else value.as_py()
    if isinstance(value, np.ma.MaskedArray):
        return value.tolist()
    if isinstance(value, (pd.Series, pd.api.extensions.ExtensionArray)):
        return [None if missing else v for v, missing in zip(value.tolist(), pd.isna(value), strict=True)]
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
