"""Convert from and to Apache Arrow (pyarrow), whose arrays have values and a validity bitmap (1 where valid)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from masked_dispatch.interop.crossing import OF_NUMPY, Parts, as_masked, leaving, stacked, takes
from masked_dispatch.tensor.masked_tensor import MaskedTensor

ARROW = OF_NUMPY - {torch.complex64, torch.complex128}


@takes(
    data=(pa.Array, pa.ChunkedArray, pa.Table, pa.RecordBatch),
    instead="pass pyarrow.array(data), whose nulls are Python's None",
)
def from_arrow(
    data: pa.Array | pa.ChunkedArray | pa.Table | pa.RecordBatch, dtype: torch.dtype | None = None
) -> MaskedTensor:
    """Convert an Arrow array to a masked tensor of shape (n,), or a table or record batch to one of (n, columns).

    data   bool, integers or floating point numbers. Null elements become invalid; NaN is a value
    dtype  the dtype of the result, required for a table whose columns have several dtypes

    The result shares the values of an array in one chunk of writable memory, except bool. Arrow assumes that its values
    never change, so write to ``from_arrow(data).clone()``. The function copies other values and all masks.

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
    """Copy a tensor to an Arrow array (shape (n,)) or, with column `names`, to a table (shape (n, columns)).

    Invalid elements become null, with 0 in the value buffer.

    Raises RuntimeError if `x` requires grad; TypeError if it is not on the CPU, or has a dtype that Arrow lacks;
    ValueError for other dimensions, or names that do not match.
    """
    values, valid = leaving(x, "Arrow", ARROW)
    if x.ndim == 1 and names is None:
        return _array(values, valid)
    if x.ndim == 2 and names is not None and len(names) == x.shape[1]:
        return pa.table([_array(values[:, i], valid[:, i]) for i in range(x.shape[1])], names=list(names))
    given = "no names" if names is None else f"{len(names)} names"
    raise ValueError(
        f"a tensor of shape {tuple(x.shape)} with {given}: an Arrow array has one dimension and no names, a table "
        "has two dimensions and a name for each column, to_arrow(x, names=[...])"
    )


def _array(values: Tensor, valid: Tensor) -> Any:
    """Build an Arrow array from copies of the parts."""
    array = np.ascontiguousarray(values.numpy())
    kind = pa.from_numpy_dtype(array.dtype)
    if values.dtype is torch.bool:
        array = np.packbits(array, bitorder="little")
    nulls = len(valid) - int(valid.sum())
    bitmap = pa.py_buffer(np.packbits(valid.numpy(), bitorder="little").tobytes()) if nulls else None
    return pa.Array.from_buffers(kind, len(valid), [bitmap, pa.py_buffer(array.tobytes())], nulls)


def _parts(column: pa.Array | pa.ChunkedArray, name: str) -> Parts:
    """Return the values of one column, shared if possible, and a copy of its mask."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):  # older versions return this type
        array = pa.concat_arrays(array.chunks)
    kind = array.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        other = "combine its parts" if pa.types.is_nested(kind) else "convert it: pyarrow.compute.cast(column, ...)"
        if pa.types.is_dictionary(kind):
            other = "take its numbers, column.indices, or its values, column.dictionary_decode()"
        raise TypeError(f"column {name} of type {kind} has no equivalent in torch; {other}")
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
    """Return a tensor that shares memory which NumPy marks read-only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def _bits(buffer: pa.Buffer, offset: int, count: int) -> Tensor:
    """Copy `count` bits from `offset` on to a bool tensor."""
    bits = np.unpackbits(np.frombuffer(buffer, np.uint8), count=offset + count, bitorder="little")
    return torch.from_numpy(bits[offset:].astype(bool))
