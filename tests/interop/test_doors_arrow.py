"""Arrow there and back: arrays, chunked arrays, tables and record batches, with their validity bitmaps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
import pytest
import torch
from hypothesis import given

import masked_dispatch as md
from door_samples import FLOATS, INTEGERS, UNSIGNED, masked, same, shapes
from masked_dispatch import interop

DTYPES = (torch.bool, *INTEGERS, *UNSIGNED, torch.float16, *FLOATS)
X = md.masked_tensor([[1.0, float("nan")], [3.0, 4.0]], [[True, False], [True, True]])


@given(masked(DTYPES, shapes(1, most=20)), st.data())
def test_arrays_there_and_back(x: md.MaskedTensor, data: st.DataObject) -> None:
    array = interop.to_arrow(x)
    array.validate(full=True)
    assert array.is_null().to_pylist() == (~x.get_mask()).tolist()
    assert array.null_count == len(x) - int(x.count())
    same(interop.from_arrow(array), x)
    start = data.draw(st.integers(0, len(x)))
    length = data.draw(st.integers(0, len(x) - start))
    same(interop.from_arrow(array.slice(start, length)), x[start : start + length])
    chunks = pa.chunked_array([array.slice(start), array.slice(0, start)])
    same(interop.from_arrow(chunks), torch.cat([x[start:], x[:start]]))
    assert interop.to_arrow(interop.from_arrow(array)).equals(array) or x.dtype.is_floating_point


@given(masked(DTYPES, shapes(2)))
def test_tables_there_and_back(x: md.MaskedTensor) -> None:
    names = [f"c{i}" for i in range(x.shape[1])]
    table = interop.to_arrow(x, names=names)
    table.validate(full=True)
    assert table.column_names == names
    if names:
        same(interop.from_arrow(table), x)
        same(interop.from_arrow(table.combine_chunks().to_batches()[0] if len(x) else table), x)


def test_what_arrow_makes_of_nulls() -> None:
    same(interop.from_arrow(pa.array([1, None, 3])), md.masked_tensor([1, 0, 3], [True, False, True]))
    same(interop.from_arrow(pa.array([True, None])), md.masked_tensor([True, False], [True, False]))
    x = interop.from_arrow(pa.array([float("nan"), None]))
    assert x.get_mask().tolist() == [True, False]
    assert interop.from_arrow(pa.chunked_array([], type=pa.int8())).dtype is torch.int8


def test_values_are_shared_where_memory_may_be_written_to() -> None:
    array = pa.array([1.0, None, 3.0])
    x = interop.from_arrow(array)
    assert x.get_data().data_ptr() == array.buffers()[1].address
    assert interop.from_arrow(array[1:]).get_data().data_ptr() == array.buffers()[1].address + 8
    constant = pa.Array.from_buffers(pa.int64(), 1, [None, pa.py_buffer(b"\1" + b"\0" * 7)])
    copy = interop.from_arrow(constant)
    copy[0] = 5
    assert constant.to_pylist() == [1]


def test_what_is_under_a_null_does_not_leave() -> None:
    x = md.masked_tensor([1.0, 666.0], [True, False])
    assert interop.from_arrow(
        pa.Array.from_buffers(pa.float32(), 2, [None, interop.to_arrow(x).buffers()[1]])
    ).tolist() == [1, 0]
    y = md.masked_tensor([1.0, 2.0])
    array = interop.to_arrow(y)
    y[0] = 9
    assert array.to_pylist() == [1, 2]


TABLE = pa.table({"a": [1, None], "b": [0.5, None]})


def test_columns_of_several_types_need_one_dtype() -> None:
    text = (
        r"have several: 'a' torch.int64, 'b' torch.float64\. Choose one, from_arrow\(table, dtype=torch.float64\), or "
        r"convert \{name: from_arrow\(table\[name\]\) for name in table.column_names\}"
    )
    with pytest.raises(TypeError, match=text):
        interop.from_arrow(TABLE)
    expected = md.masked_tensor([[1, 0.5], [0, 0]], [[True, True], [False, False]])
    same(interop.from_arrow(TABLE, dtype=torch.float32), expected)
    assert interop.from_arrow(TABLE["a"], dtype=torch.float32).dtype is torch.float32
    twice = pa.table([TABLE["b"], TABLE["b"]], names=["b", "b"])
    assert interop.from_arrow(twice).shape == (2, 2)


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (
            pa.array(["a", None]),
            r"column of the array of type string has no equivalent .*pyarrow.compute.cast\(column, ",
        ),
        (pa.array([None, None]), "of type null has no equivalent"),
        (pa.array([[1], [2, 3]]), r"type list.* combine its parts"),
        (pa.array(["a", "b"]).dictionary_encode(), r"column.indices, or its values, column.dictionary_decode\(\)"),
        (pa.array([0], pa.timestamp("s")), "of type timestamp"),
        (pa.array([1], pa.decimal128(5)), "of type decimal128"),
    ],
)
def test_columns_without_numbers_are_refused(array: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        interop.from_arrow(array)
    with pytest.raises(TypeError, match="column 'c' of type"):
        interop.from_arrow(pa.table({"c": array}))


@pytest.mark.parametrize(
    ("convert", "error", "text"),
    [
        (lambda: interop.to_arrow(X[0].clone().requires_grad_()), RuntimeError, r"Arrow has no gradients.*x.detach"),
        (
            lambda: interop.to_arrow(X[0].bfloat16()),
            TypeError,
            r"Arrow has no dtype for .*bfloat16, .*: pass x.float\(\)",
        ),
        (lambda: interop.to_arrow(X[0].cfloat()), TypeError, "complex64, .*: pass x.real and x.imag"),
        (lambda: interop.to_arrow(X), ValueError, r"shape \(2, 2\) with no names: .*to_arrow\(x, names="),
        (lambda: interop.to_arrow(X, names=["a"]), ValueError, r"shape \(2, 2\) with 1 names: an Arrow array has"),
        (lambda: interop.to_arrow(X[0], names=["a"]), ValueError, "an Arrow array has one dimension and no names"),
        (lambda: interop.to_arrow(X.sum()), ValueError, r"shape \(\) with no names"),
    ],
)
def test_tensors_that_arrow_cannot_hold_are_refused(
    convert: Callable[[], Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        convert()


def test_arrow_s_own_constructor() -> None:
    assert pa.array(X[0]).to_pylist() == [1.0, None]
    assert pa.array(X[0].to_sparse()).to_pylist() == [1.0, None]
    assert pa.array(X[0], type=pa.float64()).type == pa.float64()
