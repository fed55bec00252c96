"""pandas there and back: nullable Series and DataFrames with their index, names and columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given

import masked_dispatch as md
from door_samples import FLOATS, INTEGERS, UNSIGNED, masked, same, shapes
from masked_dispatch import interop

DTYPES = (torch.bool, *INTEGERS, *UNSIGNED, *FLOATS)
X = md.masked_tensor([[1.0, float("nan")], [3.0, 4.0]], [[True, False], [True, True]])


@given(masked(DTYPES, shapes(1)), st.data())
def test_series_there_and_back(x: md.MaskedTensor, data: st.DataObject) -> None:
    index = data.draw(st.lists(st.text(max_size=2), min_size=len(x), max_size=len(x)))
    series = interop.to_pandas(x, index=index, name="n")
    assert series.isna().tolist() == (~x.get_mask()).tolist()
    assert series.index.tolist() == index
    same(interop.from_pandas(series), x)
    again = interop.to_pandas(interop.from_pandas(series), index=series.index, name=series.name)
    pd.testing.assert_series_equal(again, series)


@given(masked(DTYPES, shapes(2)), st.data())
def test_frames_there_and_back(x: md.MaskedTensor, data: st.DataObject) -> None:
    rows, columns = x.shape
    index = data.draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    names = data.draw(st.lists(st.text(max_size=1), min_size=columns, max_size=columns))
    frame = interop.to_pandas(x, index=index, columns=names)
    assert frame.columns.tolist() == names
    assert frame.index.tolist() == index
    same(interop.from_pandas(frame, dtype=None if columns else x.dtype), x)
    again = interop.to_pandas(interop.from_pandas(frame, x.dtype), index=frame.index, columns=frame.columns)
    pd.testing.assert_frame_equal(again, frame)


def test_hierarchical_labels_are_handed_back() -> None:
    index = pd.MultiIndex.from_tuples([("a", 1), ("b", 2)], names=["l", "n"])
    frame = interop.to_pandas(X, index=index, columns=pd.Index(["p", "q"], name="c"))
    again = interop.to_pandas(interop.from_pandas(frame), index=frame.index, columns=frame.columns)
    pd.testing.assert_frame_equal(again, frame)


MISSING = {
    "Float64": pd.Series([1.0, None, 3.0], dtype="Float64"),
    "Int8": pd.Series([1, None, 3], dtype="Int8"),
    "boolean": pd.Series([True, None, False], dtype="boolean"),
    "float64": pd.Series([1.0, np.nan, 3.0]),
    "int64[pyarrow]": pd.Series([1, None, 3], dtype="int64[pyarrow]"),
    "bool[pyarrow]": pd.Series([True, None, False], dtype="bool[pyarrow]"),
    "Index": pd.Index([1.0, np.nan, 3.0]),
    "array": pd.array([1, None, 3], dtype="UInt16"),
}


@pytest.mark.parametrize("name", MISSING)
def test_what_pandas_calls_missing_is_invalid(name: str) -> None:
    x = interop.from_pandas(MISSING[name])
    assert x.get_mask().tolist() == [True, False, True]
    assert x.to_tensor(0)[[0, 2]].tolist() == [value for value in MISSING[name].tolist() if not pd.isna(value)]


def test_nan_of_a_nullable_column_is_a_value() -> None:
    array = pd.arrays.FloatingArray(np.array([1.0, np.nan, 2.0]), np.array([False, False, True]))
    x = interop.from_pandas(pd.Series(array))
    assert x.get_mask().tolist() == [True, True, False]
    assert x[1].isnan().item()
    again = interop.to_pandas(x)
    assert again.isna().tolist() == [False, False, True]
    arrow = pd.Series(pa.array([1.0, None, float("nan")]), dtype=pd.ArrowDtype(pa.float64()))
    assert interop.from_pandas(arrow).get_mask().tolist() == [True, False, True]


def test_nothing_is_shared() -> None:
    series = pd.Series([1.0, 2.0])
    x = interop.from_pandas(series)
    x[0] = 9
    assert series[0] == 1
    y = md.masked_tensor([1, 2])
    out = interop.to_pandas(y)
    y[0] = 9
    assert out[0] == 1
    out[1] = 7
    assert y[1].item() == 2


FRAME = pd.DataFrame({"a": pd.array([1, None], dtype="Int64"), "b": [0.5, np.nan]})


def test_columns_of_several_dtypes_need_one() -> None:
    text = (
        r"these columns have several: 'a' torch.int64, 'b' torch.float64\. Choose one, from_pandas\(frame, "
        r"dtype=torch.float64\), or convert \{name: from_pandas\(frame\[name\]\) for name in frame\}"
    )
    with pytest.raises(TypeError, match=text):
        interop.from_pandas(FRAME)
    x = interop.from_pandas(FRAME, dtype=torch.float32)
    same(x, md.masked_tensor([[1, 0.5], [0, 0]], [[True, True], [False, False]]))
    assert {name: interop.from_pandas(FRAME[name]).dtype for name in FRAME} == {"a": torch.int64, "b": torch.float64}
    assert interop.from_pandas(FRAME["a"], dtype=torch.float16).dtype is torch.float16


def test_frames_without_rows_or_columns_and_with_equal_names() -> None:
    assert interop.from_pandas(FRAME[:0], dtype=torch.float64).shape == (0, 2)
    assert interop.from_pandas(FRAME[[]], dtype=torch.int8).shape == (2, 0)
    twice = pd.concat([FRAME[["b"]], FRAME[["b"]]], axis=1)
    assert interop.from_pandas(twice).shape == (2, 2)


@pytest.mark.parametrize(
    ("series", "text"),
    [
        (
            pd.Series(["a", None], name="t"),
            r"'t' of dtype \w+ has no equivalent .*pd.to_numeric\(series\).*pd\.factorize\(series\)\[0\]",
        ),
        (pd.Series([True, None]), r"dtype object has no equivalent .* series.convert_dtypes\(\)"),
        (pd.Series(["a", None], dtype="category"), r"^this Series of dtype category .* series.cat.codes"),
        (pd.Series(pd.to_datetime(["2020", None])), r"dtype datetime64.*\)\.dt\.total_seconds\(\)"),
        (pd.Series(["a"], dtype="string[pyarrow]"), "has no equivalent in torch"),
        (pd.Series([1.0], dtype="Sparse[float]"), r"series.sparse.to_dense\(\)"),
    ],
    ids=["text", "object", "category", "datetime", "arrow text", "sparse"],
)
def test_columns_without_numbers_are_refused(series: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        interop.from_pandas(series)
    with pytest.raises(TypeError, match="column 'c' "):
        interop.from_pandas(pd.DataFrame({"c": series}))


@pytest.mark.parametrize(
    ("convert", "error", "text"),
    [
        (lambda: interop.to_pandas(X[0].clone().requires_grad_()), RuntimeError, r"pandas.*no gradients.*x.detach"),
        (
            lambda: interop.to_pandas(X.half()),
            TypeError,
            r"nullable dtypes, has no dtype for .*float16, .*: pass x.float\(\)",
        ),
        (lambda: interop.to_pandas(X.cfloat()), TypeError, r"complex64, .*: pass x.real and x.imag"),
        (lambda: interop.to_pandas(X.sum()), ValueError, r"shape \(\) has 0 dimensions; a Series has 1"),
        (lambda: interop.to_pandas(X[None]), ValueError, r"shape \(1, 2, 2\) has 3 dimensions.*x.flatten\(1\)"),
        (lambda: interop.to_pandas(X, name="n"), ValueError, r"a DataFrame, which has no name: pass columns="),
        (
            lambda: interop.to_pandas(X[0], columns=["a"]),
            ValueError,
            r"becomes a Series, which has no columns: pass name=",
        ),
    ],
)
def test_tensors_that_pandas_cannot_hold_are_refused(
    convert: Callable[[], Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        convert()


def test_sparse_storage_and_plain_tensors_leave_too() -> None:
    pd.testing.assert_frame_equal(interop.to_pandas(X.to_sparse()), interop.to_pandas(X))
    assert not interop.to_pandas(torch.ones(2)).isna().any()


def test_pandas_itself_is_told_what_to_write() -> None:
    for make in (pd.Series, pd.DataFrame):
        with pytest.raises(md.InvalidValueError, match=r"masked_dispatch\.interop\..*to_pandas\(x\)"):
            make(X[0] if make is pd.Series else X)
    assert pd.Series(md.masked_tensor([1, 2])).tolist() == [1, 2]
