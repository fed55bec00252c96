"""rolling: pandas is the oracle, for windows of any size, centred or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import masked_dispatch as md
from columns_in_pandas import ROLLING_WORDS, assert_rolling_as_in_pandas, columns
from door_samples import same
from masked_dispatch import missing
from words_for_missing_values import F, T, X

NAN = float("nan")


@given(st.data(), columns(7), st.sampled_from(ROLLING_WORDS), st.integers(1, 6), st.booleans(), st.sampled_from([0, 1]))
def test_rolling_statistics_are_those_of_pandas(
    data: st.DataObject, x: md.MaskedTensor, word: str, window: int, center: bool, dim: int
) -> None:
    min_count = data.draw(st.none() | st.integers(1, window))
    assert_rolling_as_in_pandas(x, window, center, min_count, word, dim)


def test_without_a_min_count_only_whole_windows_have_a_result() -> None:
    x = md.masked_tensor([1.0, 2.0, 4.0, 8.0, 16.0], [T, T, T, F, T])
    same(missing.rolling(x, 2, 0).mean(), md.masked_tensor([0, 1.5, 3, 0, 0], [F, T, T, F, F]))
    same(missing.rolling(x, 2, 0, min_count=1).sum(), md.masked_tensor([1.0, 3, 6, 4, 16]))
    same(missing.rolling(x, 2, 0, center=True).sum(), md.masked_tensor([0.0, 3, 6, 0, 0], [F, T, T, F, F]))
    same(missing.rolling(x, 3, 0, center=True).sum(), md.masked_tensor([0.0, 7, 0, 0, 0], [F, T, F, F, F]))
    assert missing.rolling(x, 9, 0).count().tolist() == [1, 2, 3, 3, 4]


def test_of_nothing_only_the_sum_has_a_value() -> None:
    x = md.masked_tensor([1.0, 2.0], [F, T])
    same(missing.rolling(x, 1, 0, min_count=0).sum(), md.masked_tensor([0.0, 2.0]))
    same(missing.rolling(x, 1, 0, min_count=0).max(), md.masked_tensor([0.0, 2.0], [F, T]))


def test_what_is_outside_of_a_window_takes_no_part() -> None:
    x = torch.tensor([1e300, float("inf"), NAN, 1.0, 2.0, 3.0, 1e9, 1e9 + 1, 1e9 + 2], dtype=torch.float64)
    rolling = missing.rolling(x, 3, 0)
    assert rolling.mean().to_tensor(0)[5].item() == 2
    assert rolling.var().to_tensor(0)[5].item() == rolling.var().to_tensor(0)[8].item() == 1


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64], ids=str
)
def test_every_dtype(dtype: torch.dtype) -> None:
    x = md.masked_tensor(torch.tensor([1, 0, 3, 1]).to(dtype), [T, F, T, T])
    windows = x.unfold(0, 2, 1)
    rolling = missing.rolling(x, 2, 0, min_count=1)
    same(rolling.sum()[1:], windows.sum(-1))
    if not dtype.is_complex:
        same(rolling.min()[1:], windows.amin(-1))
        same(rolling.max()[1:], windows.amax(-1))


def test_a_window_of_thousands_of_elements() -> None:
    x = torch.arange(5000.0, dtype=torch.float64)
    assert missing.rolling(x, 4097, 0).mean().to_tensor(0)[-1].item() == 4999 - 2048


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: missing.rolling(X, 0, 0), ValueError, "at least 1 element, not window=0"),
        (
            lambda: missing.rolling(X, 2, 0, min_count=3),
            ValueError,
            "min_count has to lie between 0 and .* window, 2; got 3",
        ),
        (lambda: missing.rolling(X, 2, 2), IndexError, "Dimension out of range"),
        (lambda: missing.rolling(X.long(), 2, 0).mean(), TypeError, "mean needs .* got torch.int64"),
        (lambda: missing.rolling(X.to(torch.complex64), 2, 0).min(), TypeError, "complex values have no order"),
        (lambda: missing.rolling(pd.Series([1.0]), 2, 0), TypeError, r"not a Series: pass masked_dispatch\.interop\."),
        (lambda: missing.rolling(X, 2, 0).median(), AttributeError, r"not median; .* x\.unfold\(dim, window, 1\)"),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()
