"""Combine the columns of a table into one tensor."""

from __future__ import annotations

import torch

from masked_dispatch.interop.crossing import Parts, as_masked
from masked_dispatch.tensor.masked_tensor import MaskedTensor


def stacked(columns: dict[str, Parts], rows: int, dtype: torch.dtype | None, instead: str) -> MaskedTensor:
    """Stack the columns side by side, shape (rows, columns), converted to `dtype`.

    Raises TypeError, with the hint `instead`, for columns of several dtypes without `dtype`.
    """
    check_dtype(dtype)
    if dtype is None and len({parts.values.dtype for parts in columns.values()}) > 1:
        kinds = ", ".join(f"{name} {parts.values.dtype}" for name, parts in columns.items())
        raise TypeError(f"a tensor has one dtype, and these columns have several: {kinds}. Choose one, {instead}")
    if not columns:
        return as_masked(torch.empty(rows, 0, dtype=dtype))
    values = [parts.values if dtype is None else parts.values.to(dtype) for parts in columns.values()]
    return as_masked(torch.stack(values, 1), torch.stack([parts.valid for parts in columns.values()], 1))


def check_dtype(dtype: object) -> None:
    """Refuse names of dtypes, which other libraries accept."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype={dtype!r} is not a dtype of torch: pass one, such as torch.float64")
