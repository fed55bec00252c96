"""numpy.ma, pandas, pyarrow: where they differ from masked tensors (docs/other_libraries.md), and where all agree."""

from __future__ import annotations

import math
import re

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch

import masked_dispatch as md
from agreeing_libraries import (
    OF_ONE,
    OF_TWO,
    Column,
    answer,
    in_arrow,
    in_numpy,
    in_pandas,
    ours,
)
from repository import ROOT

GARBAGE = 1e30


NOTHING: Column = [None, None]


def test_sum_of_nothing() -> None:
    """sum and product with nothing valid"""
    assert answer(ours(NOTHING).sum()) is None
    assert in_numpy(NOTHING).sum() is np.ma.masked
    assert in_pandas(NOTHING).sum() == 0
    assert in_pandas(NOTHING).prod() == 1
    assert answer(pc.sum(in_arrow(NOTHING))) is None


def test_any_and_all_of_nothing() -> None:
    """any and all with nothing valid"""
    assert answer((ours(NOTHING) > 0).any()) is None
    assert (in_numpy(NOTHING) > 0).any() is np.ma.masked
    assert bool((in_pandas(NOTHING) > 0).any()) is False
    assert bool((in_pandas(NOTHING) > 0).all()) is True
    assert answer(pc.any(pc.greater(in_arrow(NOTHING), 0))) is None


def test_an_empty_column() -> None:
    """a column of length 0"""
    assert answer(ours([]).sum()) == 0
    assert math.isnan(answer(ours([]).mean()))
    assert in_numpy([]).sum() is np.ma.masked
    assert in_pandas([]).sum() == 0
    assert answer(in_pandas([]).mean()) is None
    assert answer(pc.sum(in_arrow([]))) is None


def test_divisor_of_a_variance() -> None:
    """divisor of a variance, by default"""
    column: Column = [1.0, None, 3.0]
    assert answer(ours(column).var()) == in_pandas(column).var() == 2
    assert in_numpy(column).var() == answer(pc.variance(in_arrow(column))) == 1


def test_variance_of_one_element() -> None:
    """variance of one element"""
    column: Column = [1.0, None]
    with pytest.warns(UserWarning, match="degrees of freedom"):
        torch.tensor([1.0]).var()
    assert math.isnan(answer(ours(column).var()))
    assert in_numpy(column).var(ddof=1) is np.ma.masked
    assert answer(in_pandas(column).var()) is None
    assert answer(pc.variance(in_arrow(column), ddof=1)) is None


def test_argmin_of_nothing() -> None:
    """argmin with nothing valid"""
    assert answer(ours(NOTHING).argmin()) is None
    assert in_numpy(NOTHING).argmin() == 0
    assert answer(pc.index(in_arrow(NOTHING), pc.min(in_arrow(NOTHING)))) == -1
    if int(pd.__version__.partition(".")[0]) >= 3:
        with pytest.raises(ValueError, match="all NA"):
            in_pandas(NOTHING).argmin()


def test_median_of_an_even_number() -> None:
    """median of an even number of elements"""
    column: Column = [1.0, None, 2.0]
    assert answer(ours(column).median()) == 1
    assert np.ma.median(in_numpy(column)) == in_pandas(column).median() == 1.5
    assert answer(pc.quantile(in_arrow(column), 0.5)) == [1.5]
    assert answer(ours(column).quantile(0.5)) == 1.5


def test_several_modes() -> None:
    """several modes"""
    column: Column = [2.0, 1.0, None, 2.0, 1.0]
    assert answer(ours(column).mode().values) == 1
    assert answer(in_pandas(column).mode()) == [1, 2]
    assert [m["mode"] for m in answer(pc.mode(in_arrow(column), 2))] == [1, 2]


def test_missing_among_the_unique() -> None:
    """missing elements in `unique`"""
    column: Column = [1.0, None, 1.0]
    assert answer(ours(column).unique()) == [1]
    assert answer(np.ma.unique(in_numpy(column))) == [1, None]
    assert answer(in_pandas(column).unique()) == [1, None]
    assert answer(pc.unique(in_arrow(column))) == [1, None]


def test_scan_at_the_first_missing_element() -> None:
    """a scan at a missing element"""
    column: Column = [1.0, None, 2.0]
    assert answer(ours(column).cumsum(0)) == answer(in_pandas(column).cumsum()) == [1, None, 3]
    assert answer(pc.cumulative_sum(in_arrow(column))) == answer(md.cumsum(ours(column), 0, skipna=False))
    assert answer(md.cumsum(ours(column), 0, skipna=False)) == [1, None, None]


def test_nan_is_a_value() -> None:
    """NaN"""
    column: Column = [math.nan, None, 1.0]
    assert math.isnan(answer(ours(column).sum()))
    assert math.isnan(in_numpy(column).sum())
    assert pd.Series([math.nan, 1.0]).sum() == 1
    assert math.isnan(answer(pc.sum(in_arrow(column))))
    assert math.isnan(answer(ours(column).amin()))
    assert math.isnan(in_numpy(column).min())
    assert answer(pc.min(in_arrow(column))) == 1  # arrow's least element passes over NaN


@pytest.mark.filterwarnings("ignore:.*encountered in log")
def test_results_out_of_the_domain() -> None:
    """results outside a function's domain: log(-1), 1 / 0"""
    assert math.isnan(answer(ours([-1.0]).log())[0])
    assert answer(np.ma.log(in_numpy([-1.0]))) == [None]
    assert pd.isna(np.log(pd.Series([-1.0]))).tolist() == [True]
    assert math.isnan(answer(pc.ln(in_arrow([-1.0])))[0])
    assert answer(ours([1.0]) / ours([0.0])) == answer(pc.divide(in_arrow([1.0]), in_arrow([0.0]))) == [math.inf]
    assert answer(in_numpy([1.0]) / in_numpy([0.0])) == [None]


def test_comparison_with_missing() -> None:
    """`missing != missing`"""
    assert answer(ours([None]) != ours([None])) == [None]
    assert (pd.Series([math.nan]) != pd.Series([math.nan])).tolist() == [True]  # where NaN stands for missing
    assert answer(in_pandas([None]) != in_pandas([None])) == [None]


def test_three_valued_logic() -> None:
    """True or missing; any with `skipna=False` of True and missing"""
    true, unknown = [1.0], [None]
    assert answer((ours(true) > 0) | (ours(unknown) > 0)) == [None]
    assert answer((in_numpy(true) > 0) | (in_numpy(unknown) > 0)) == [None]
    assert answer((in_pandas(true) > 0) | (in_pandas(unknown) > 0)) == [True]
    positive = [pc.greater(in_arrow(column), 0) for column in (true, unknown)]
    assert answer(pc.or_(*positive)) == [None]
    assert answer(pc.or_kleene(*positive)) == [True]
    both = [1.0, None]
    assert answer(md.any(ours(both) > 0, skipna=False)) is None
    assert bool((in_pandas(both) > 0).any(skipna=False)) is True
    assert answer(pc.any(pc.greater(in_arrow(both), 0), skip_nulls=False)) is True


def test_where_with_a_missing_condition() -> None:
    """`where` with a missing condition"""
    condition: Column = [None, 1.0]
    assert answer(torch.where(ours(condition) > 0, 1.0, 2.0)) == [None, 1]
    assert answer(np.ma.where(in_numpy(condition) > 0, 1.0, 2.0)) == [None, 1]
    assert answer(pc.if_else(pc.greater(in_arrow(condition), 0), 1.0, 2.0)) == [None, 1]
    assert answer(in_pandas([5.0, 5.0]).where(in_pandas(condition) > 0, 2.0)) == [2, 5]


def test_elementwise_maximum() -> None:
    """the greater of two, one missing"""
    left, right = [1.0, None], [None, 2.0]
    assert answer(torch.maximum(ours(left), ours(right))) == [None, None]
    assert answer(np.ma.maximum(in_numpy(left), in_numpy(right))) == [None, None]
    assert answer(pc.max_element_wise(in_arrow(left), in_arrow(right))) == [1, 2]
    assert answer(pd.DataFrame({"a": in_pandas(left), "b": in_pandas(right)}).max(axis=1)) == [1, 2]
    assert answer(md.amax(torch.stack([ours(left), ours(right)]), 0)) == [1, 2]


def test_filter_by_a_missing_condition() -> None:
    """filtering by a missing condition"""
    condition: Column = [1.0, None, -1.0]
    assert answer(ours([5.0, 6.0, 7.0])[ours(condition) > 0]) == [5]
    assert answer(in_pandas([5.0, 6.0, 7.0])[in_pandas(condition) > 0]) == [5]
    assert answer(in_arrow([5.0, 6.0, 7.0]).filter(pc.greater(in_arrow(condition), 0))) == [5]
    hidden = np.ma.array([True, True, False], mask=[False, True, False])
    assert answer(in_numpy([5.0, 6.0, 7.0])[hidden]) == [5, 6]  # numpy.ma reads what is under the mask


def test_a_python_number_of_what_is_missing() -> None:
    """`float()` and `bool()` of something missing"""
    with pytest.raises(md.InvalidValueError):
        float(ours(NOTHING).sum())
    with pytest.warns(UserWarning, match="converting a masked element to nan"):
        assert math.isnan(float(np.ma.masked))
    with pytest.raises(TypeError):
        float(pd.NA)
    assert pc.sum(in_arrow(NOTHING)).as_py() is None
    with pytest.raises(md.InvalidValueError):
        bool((ours(NOTHING) > 0).any())
    assert not (in_numpy(NOTHING) > 0).any()
    with pytest.raises(TypeError, match="ambiguous"):
        bool(pd.NA)


def test_dtype_of_a_mean_of_integers() -> None:
    """mean of integers"""
    integers = md.masked_tensor(torch.tensor([1, 2]), torch.tensor([True, False]))
    with pytest.raises(RuntimeError, match="could not infer output dtype"):
        integers.mean()
    assert np.ma.array([1, 2], mask=[False, True]).mean() == 1.0
    assert pd.Series([1, None], dtype="Int64").mean() == 1.0
    assert answer(pc.mean(pa.array([1, None]))) == 1.0


def test_the_document_has_every_difference() -> None:
    """A test has the title of its row."""
    text = (ROOT / "docs" / "other_libraries.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|\n]+) \|", text.partition("\n## Where they differ\n")[2], re.MULTILINE)
    tests = [test.__doc__ for name, test in globals().items() if name.startswith("test_")]
    assert rows == tests[: tests.index(test_the_document_has_every_difference.__doc__)]


# ---------------------------------------------------------------------------------------------------- where all agree


def test_the_document_has_every_function() -> None:
    text = (ROOT / "docs" / "other_libraries.md").read_text(encoding="utf-8")
    names = {name.partition(",")[0].partition("(")[0].strip() for name in (*OF_ONE, *OF_TWO)}
    missing = [name for name in sorted(names) if f"`{name}`" not in text]
    assert not missing, missing
