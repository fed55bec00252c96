"""Groups and rolling windows beside pandas, on many columns."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import masked_dispatch as md
from columns_in_pandas import (
    GROUP_WORDS,
    LABELS,
    ROLLING_WORDS,
    assert_groups_as_in_pandas,
    assert_rolling_as_in_pandas,
    columns,
    labels_of,
)


@pytest.mark.parametrize("word", GROUP_WORDS)
@settings(max_examples=100)
@given(st.data(), columns(40), st.sampled_from(list(LABELS)), st.sampled_from([0, 1]))
def test_groups(word: str, data: st.DataObject, x: md.MaskedTensor, kind: str, dim: int) -> None:
    assert_groups_as_in_pandas(x, data.draw(labels_of(kind, len(x))), word, dim)


@pytest.mark.parametrize("word", ROLLING_WORDS)
@settings(max_examples=100)
@given(st.data(), columns(40), st.integers(1, 45), st.booleans(), st.sampled_from([0, 1]))
def test_rolling(word: str, data: st.DataObject, x: md.MaskedTensor, window: int, center: bool, dim: int) -> None:
    min_count = data.draw(st.none() | st.integers(1, window))
    assert_rolling_as_in_pandas(x, window, center, min_count, word, dim)
