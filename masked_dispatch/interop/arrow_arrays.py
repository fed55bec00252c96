"""Doors to Apache Arrow (pyarrow): a validity bitmap of 1 where valid, and values."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from masked_dispatch.interop.crossing import OF_NUMPY, Parts, as_masked, leaving, takes
from masked_dispatch.interop.tables import stacked
from masked_dispatch.tensor.masked_tensor import MaskedTensor

ARROW = OF_NUMPY - {torch.complex64, torch.complex128}


@takes(
    data=(pa.Array, pa.ChunkedArray, pa.Table, pa.RecordBatch),
    instead="pass pyarrow.array(data), whose nulls are Python's None",
)
def from_arrow(
    data: pa.Array | pa.ChunkedArray | pa.Table | pa.RecordBatch, dtype: torch.dtype | None = None
) -> MaskedTensor:
    """An array of Arrow as a masked tensor of shape (n,); a table or record batch as one of (n, columns).

    data   of bool, integers or floating point numbers. What is null is invalid; NaN is a value
    dtype  convert to it. Needed for a table whose columns have several dtypes

    The values of an array in one chunk, not bool, in memory that may be written to, are shared: Arrow takes them for
    constant, so write to ``from_arrow(data).clone()``. Others are copied, and so is every mask.

    Raises TypeError for columns of other types, or of several without `dtype`.
    """
    if isinstance(data, (pa.Table, pa.RecordBatch)):
        names = [repr(name) for name in data.schema.names]
        if len(set(names)) < len(names):
            names = [f"number {i}" for i in range(len(names))]
        columns = {name: _parts(data.column(i), name) for i, name in enumerate(names)}
        each = "{name: from_arrow(table[name]) for name in table.column_names}"
        return stacked(columns, data.num_rows, dtype, f"from_arrow(table, dtype=torch.float64), or convert {each}")
    values, valid = _parts(data, "of the array")
    return as_masked(values if dtype is None else values.to(dtype), valid)


@takes(x=Tensor)
def to_arrow(x: Tensor, names: Sequence[str] | None = None) -> Any:
    """A copy as an array of Arrow (shape (n,)) or, with `names` of its columns, a table (shape (n, columns)).

    What is invalid is null, and 0 in the buffer under it.

    Raises RuntimeError if `x` requires grad; TypeError if it is not on the CPU, or of a dtype that Arrow does not have;
    ValueError for other dimensions, or names that do not fit.
    """
    values, valid = leaving(x, "Arrow", ARROW)
    if x.ndim == 1 and names is None:
        return _array(values, valid)
    if x.ndim == 2 and names is not None and len(names) == x.shape[1]:
        return pa.table([_array(values[:, i], valid[:, i]) for i in range(x.shape[1])], names=list(names))
    given = "no names" if names is None else f"{len(names)} names"
    raise ValueError(
        f"a tensor of shape {tuple(x.shape)} with {given}: an array of Arrow has one dimension and no names, a table "
        "two and a name for each column, to_arrow(x, names=[…])"
    )


def _array(values: Tensor, valid: Tensor) -> Any:
    """An array of Arrow around copies of the parts."""
    array = np.ascontiguousarray(values.numpy())
    kind = pa.from_numpy_dtype(array.dtype)
    if values.dtype is torch.bool:
        array = np.packbits(array, bitorder="little")
    nulls = len(valid) - int(valid.sum())
    bitmap = pa.py_buffer(np.packbits(valid.numpy(), bitorder="little").tobytes()) if nulls else None
    return pa.Array.from_buffers(kind, len(valid), [bitmap, pa.py_buffer(array.tobytes())], nulls)


def _parts(column: pa.Array | pa.ChunkedArray, name: str) -> Parts:
    """The values, shared where that is possible, and a copy of the mask of one column."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):  # what older versions give
        array = pa.concat_arrays(array.chunks)
    kind = array.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        other = "combine its parts" if pa.types.is_nested(kind) else "convert it: pyarrow.compute.cast(column, …)"
        if pa.types.is_dictionary(kind):
            other = "take its numbers, column.indices, or its values, column.dictionary_decode()"
        raise TypeError(f"column {name} of type {kind} holds no numbers that torch has; {other}")
    count = len(array)
    if not count:
        return Parts(torch.from_numpy(np.empty(0, kind.to_pandas_dtype())), torch.ones(0, dtype=torch.bool))
    bitmap, values = array.buffers()
    valid = torch.ones(count, dtype=torch.bool) if bitmap is None else _bits(bitmap, array.offset, count)
    if pa.types.is_boolean(kind):
        return Parts(_bits(values, array.offset, count), valid)
    plain = np.frombuffer(values, kind.to_pandas_dtype())[array.offset : array.offset + count]
    return Parts(_shared(plain) if values.is_mutable else torch.from_numpy(plain.copy()), valid)


def _shared(array: np.ndarray[Any, np.dtype[Any]]) -> Tensor:
    """A tensor in the same memory, of which NumPy says that it is read-only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def _bits(buffer: pa.Buffer, offset: int, count: int) -> Tensor:
    """`count` bits from the one at `offset`, as a bool tensor of its own."""
    bits = np.unpackbits(np.frombuffer(buffer, np.uint8), count=offset + count, bitorder="little")
    return torch.from_numpy(bits[offset:].astype(bool))
