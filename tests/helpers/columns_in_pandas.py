"""Statistics of groups and rolling windows beside those of pandas, on columns that hypothesis draws."""

from __future__ import annotations

import pandas as pd
import torch
from hypothesis import strategies as st

import masked_dispatch as md
from masked_dispatch import interop, missing

# From a word to what pandas' differ in: it has 0 as the sum of nothing, and no value as the variance of one element.
GROUP_WORDS = ("count", "sum", "mean", "std", "var", "min", "max", "median", "first", "last", "rank")
ROLLING_WORDS = ("count", "sum", "mean", "std", "var", "min", "max")
NUMBERS = st.integers(-4, 4).map(lambda n: n / 2) | st.floats(-1e6, 1e6)


@st.composite
def columns(draw: st.DrawFn, most: int) -> md.MaskedTensor:
    """Numbers with ties, shape (n, 2)."""
    count = draw(st.integers(1, most))
    data = draw(st.lists(NUMBERS, min_size=2 * count, max_size=2 * count))
    mask = draw(st.lists(st.booleans(), min_size=2 * count, max_size=2 * count))
    return md.masked_tensor(torch.tensor(data, dtype=torch.float64).view(count, 2), torch.tensor(mask).view(count, 2))


LABELS = {
    "integers": st.sampled_from([1958, 2001, -3, 10**7]),
    "bool": st.booleans(),
    "strings": st.sampled_from(["b", "a", "Z", None]),
}


@st.composite
def labels_of(draw: st.DrawFn, kind: str, count: int) -> pd.Series:
    return pd.Series(draw(st.lists(LABELS[kind], min_size=count, max_size=count)))


def assert_groups_as_in_pandas(x: md.MaskedTensor, labels: pd.Series, word: str, dim: int) -> None:
    """The word along `dim` gives what it gives in pandas, where pandas gives something."""
    grouped = interop.to_pandas(x).groupby(labels)
    frame = grouped.sum(min_count=1) if word == "sum" else getattr(grouped, word)()
    if word == "count":
        frame = frame.astype("Int64")
    found = getattr(missing.groupby(x if dim == 0 else x.t(), labels, dim), word)()
    groups = missing.groupby(x, labels)
    assert list(groups.labels) == sorted(labels.dropna().unique())
    compare(found if dim == 0 else found.t(), frame, word)


def assert_rolling_as_in_pandas(
    x: md.MaskedTensor, window: int, center: bool, min_count: int | None, word: str, dim: int
) -> None:
    """The word along `dim` gives what it gives in pandas, where pandas gives something."""
    least = 0 if word == "count" else min_count
    frame = getattr(interop.to_pandas(x).rolling(window, center=center, min_periods=least), word)()
    if word == "count":
        frame = frame.astype("Int64")
    found = getattr(missing.rolling(x if dim == 0 else x.t(), window, dim, center, min_count), word)()
    compare(found if dim == 0 else found.t(), frame, word)


def compare(found: torch.Tensor, frame: pd.DataFrame, word: str) -> None:
    expected = interop.from_pandas(frame, dtype=found.dtype)
    if word in ("std", "var"):  # of one element: NaN and valid here, NA there
        found = missing.nan_to_invalid(found)
    if word == "count":
        assert torch.equal(found, expected.to_tensor(0))
        return
    # pandas adds to, and takes from, one running sum.
    md.testing.assert_close(found, expected, rtol=1e-7, atol=1e-3 if word in ("std", "var") else 1e-8)
