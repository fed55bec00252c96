"""Columns with missing numbers in numpy.ma, pandas, pyarrow and here, and the functions of them on which all agree."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import torch
from hypothesis import strategies as st

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


# ------------------------------------------------------------------------------------------------ where they agree

LIBRARIES: dict[str, Callable[[Column], Any]] = {"numpy": in_numpy, "pandas": in_pandas, "arrow": in_arrow}


def agree(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, list):
        return len(mine) == len(theirs) and all(map(agree, mine, theirs))
    if mine is None or theirs is None:
        return mine is theirs
    return (
        mine == theirs or math.isclose(mine, theirs, rel_tol=1e-9, abs_tol=1e-9) or (mine != mine and theirs != theirs)
    )


# Small halves, so that ties are frequent and sums are exact.
NUMBERS = st.integers(-8, 8).map(lambda n: n / 2)
COLUMNS = st.lists(st.one_of(NUMBERS, st.none()), min_size=1, max_size=7)
PAIRS = st.integers(1, 7).flatmap(lambda n: st.tuples(*[st.lists(NUMBERS | st.none(), min_size=n, max_size=n)] * 2))


class Same(NamedTuple):
    """One function in each library that has it; `least`: with how many elements that are there they coincide."""

    ours: Callable[..., Any]
    numpy: Callable[..., Any] | None = None
    pandas: Callable[..., Any] | None = None
    arrow: Callable[..., Any] | None = None
    least: int = 0


def sorted_by(a: Any, order: str, indices: bool = False) -> Any:
    places = pc.sort_indices(a, sort_keys=[("", order)], null_placement="at_end")
    return places if indices else a.take(places)


def ramp(arange: Callable[[int], Any], column: Any) -> Any:
    """Something to add so that no column is constant."""
    return arange(len(column)) / 64


def there(a: Any) -> int:
    return len(a) - a.null_count


# ------------------------------------------------------------------------------------------------- where they coincide

OF_ONE: dict[str, Same] = {
    "count": Same(lambda x: x.count(), lambda a: a.count(), lambda s: s.count(), lambda a: pc.count(a)),
    "sum": Same(lambda x: x.sum(), lambda a: a.sum(), lambda s: s.sum(min_count=1), lambda a: pc.sum(a)),
    "sum, min_count=0": Same(
        lambda x: md.sum(x, min_count=0), None, lambda s: s.sum(), lambda a: pc.sum(a, min_count=0)
    ),
    "sum, min_count=3": Same(
        lambda x: md.sum(x, min_count=3), None, lambda s: s.sum(min_count=3), lambda a: pc.sum(a, min_count=3)
    ),
    "sum, skipna=False": Same(
        lambda x: md.sum(x, skipna=False), None, lambda s: s.sum(skipna=False), lambda a: pc.sum(a, skip_nulls=False)
    ),
    "prod": Same(lambda x: x.prod(), lambda a: a.prod(), lambda s: s.prod(min_count=1), lambda a: pc.product(a)),
    "prod, min_count=0": Same(
        lambda x: md.prod(x, min_count=0), None, lambda s: s.prod(), lambda a: pc.product(a, min_count=0)
    ),
    "mean": Same(lambda x: x.mean(), lambda a: a.mean(), lambda s: s.mean(), lambda a: pc.mean(a)),
    "mean, skipna=False": Same(
        lambda x: md.mean(x, skipna=False), None, lambda s: s.mean(skipna=False), lambda a: pc.mean(a, skip_nulls=False)
    ),
    "mean, min_count=2": Same(lambda x: md.mean(x, min_count=2), None, None, lambda a: pc.mean(a, min_count=2)),
    "var, correction=0": Same(
        lambda x: x.var(correction=0), lambda a: a.var(), lambda s: s.var(ddof=0), lambda a: pc.variance(a, ddof=0)
    ),
    "var": Same(lambda x: x.var(), lambda a: a.var(ddof=1), lambda s: s.var(), lambda a: pc.variance(a, ddof=1), 2),
    "std": Same(lambda x: x.std(), lambda a: a.std(ddof=1), lambda s: s.std(), lambda a: pc.stddev(a, ddof=1), 2),
    "amin": Same(lambda x: x.amin(), lambda a: a.min(), lambda s: s.min(), lambda a: pc.min(a)),
    "amax": Same(lambda x: x.amax(), lambda a: a.max(), lambda s: s.max(), lambda a: pc.max(a)),
    "amin, skipna=False": Same(
        lambda x: md.amin(x, skipna=False), None, lambda s: s.min(skipna=False), lambda a: pc.min(a, skip_nulls=False)
    ),
    "argmin": Same(
        lambda x: x.argmin(), lambda a: a.argmin(), lambda s: s.argmin(), lambda a: pc.index(a, pc.min(a)), 1
    ),
    "argmax": Same(
        lambda x: x.argmax(), lambda a: a.argmax(), lambda s: s.argmax(), lambda a: pc.index(a, pc.max(a)), 1
    ),
    "quantile(0.5)": Same(
        lambda x: x.quantile(0.5), np.ma.median, lambda s: s.median(), lambda a: pc.quantile(a, 0.5)[0]
    ),
    "quantile(0.3)": Same(lambda x: x.quantile(0.3), None, lambda s: s.quantile(0.3), lambda a: pc.quantile(a, 0.3)[0]),
    "quantile, lower": Same(
        lambda x: x.quantile(0.3, interpolation="lower"),
        None,
        lambda s: s.quantile(0.3, interpolation="lower"),
        lambda a: pc.quantile(a, 0.3, interpolation="lower")[0],
    ),
    "quantile, higher": Same(
        lambda x: x.quantile(0.3, interpolation="higher"),
        None,
        lambda s: s.quantile(0.3, interpolation="higher"),
        lambda a: pc.quantile(a, 0.3, interpolation="higher")[0],
    ),
    "quantile, midpoint": Same(
        lambda x: x.quantile(0.3, interpolation="midpoint"),
        None,
        lambda s: s.quantile(0.3, interpolation="midpoint"),
        lambda a: pc.quantile(a, 0.3, interpolation="midpoint")[0],
    ),
    "quantile, nearest": Same(
        lambda x: x.quantile(0.3, interpolation="nearest"),
        None,
        lambda s: s.quantile(0.3, interpolation="nearest"),
        lambda a: pc.quantile(a, 0.3, interpolation="nearest")[0],
    ),
    "median": Same(lambda x: x.median(), None, None, lambda a: pc.quantile(a, 0.5, interpolation="lower")[0]),
    "mode": Same(lambda x: x.mode().values, None, lambda s: s.mode()[0], lambda a: pc.mode(a)[0]["mode"], 1),
    "cumsum": Same(
        lambda x: x.cumsum(0),
        lambda a: a.cumsum(),
        lambda s: s.cumsum(),
        lambda a: pc.cumulative_sum(a, skip_nulls=True),
    ),
    "cumprod": Same(
        lambda x: x.cumprod(0),
        lambda a: a.cumprod(),
        lambda s: s.cumprod(),
        lambda a: pc.cumulative_prod(a, skip_nulls=True),
    ),
    "cummax": Same(
        lambda x: x.cummax(0).values, None, lambda s: s.cummax(), lambda a: pc.cumulative_max(a, skip_nulls=True)
    ),
    "cummin": Same(
        lambda x: x.cummin(0).values, None, lambda s: s.cummin(), lambda a: pc.cumulative_min(a, skip_nulls=True)
    ),
    "cumsum, skipna=False": Same(
        lambda x: md.cumsum(x, 0, skipna=False), None, lambda s: s.cumsum(skipna=False), pc.cumulative_sum
    ),
    "cummax, skipna=False": Same(
        lambda x: md.cummax(x, 0, skipna=False).values, None, lambda s: s.cummax(skipna=False), pc.cumulative_max
    ),
    "sort": Same(lambda x: x.sort().values, np.ma.sort, lambda s: s.sort_values(), lambda a: sorted_by(a, "ascending")),
    "sort, descending": Same(
        lambda x: x.sort(descending=True).values,
        None,
        lambda s: s.sort_values(ascending=False),
        lambda a: sorted_by(a, "descending"),
    ),
    "argsort": Same(
        lambda x: x.argsort(stable=True)[: int(x.count())],
        lambda a: np.ma.argsort(a, kind="stable")[: a.count()],
        lambda s: s.sort_values(kind="stable").index[: s.count()].to_numpy(),
        lambda a: sorted_by(a, "ascending", indices=True)[: there(a)],
    ),
    "topk": Same(
        lambda x: x.topk(2).values, None, lambda s: s.nlargest(2), lambda a: a.take(pc.top_k_unstable(a, 2)), 2
    ),
    "kthvalue": Same(lambda x: x.kthvalue(2).values, None, lambda s: s.nsmallest(2).iloc[1], None, 2),
    "unique": Same(
        lambda x: x.unique(),
        lambda a: np.unique(a.compressed()),
        lambda s: s.dropna().sort_values().unique(),
        lambda a: pc.unique(a.drop_null()).sort(),
    ),
    "unique, how many": Same(
        lambda x: len(x.unique()), None, lambda s: s.nunique(), lambda a: pc.count_distinct(a, mode="only_valid")
    ),
    "any": Same(lambda x: (x > 0).any(), lambda a: (a > 0).any(), None, lambda a: pc.any(pc.greater(a, 0))),
    "any, min_count=0": Same(
        lambda x: md.any(x > 0, min_count=0),
        None,
        lambda s: (s > 0).any(),
        lambda a: pc.any(pc.greater(a, 0), min_count=0),
    ),
    "all": Same(lambda x: (x > 0).all(), lambda a: (a > 0).all(), None, lambda a: pc.all(pc.greater(a, 0))),
    "all, min_count=0": Same(
        lambda x: md.all(x > 0, min_count=0),
        None,
        lambda s: (s > 0).all(),
        lambda a: pc.all(pc.greater(a, 0), min_count=0),
    ),
    "exp": Same(lambda x: x.exp(), np.ma.exp, np.exp, pc.exp),
    "abs": Same(lambda x: x.abs(), abs, abs, pc.abs),
    "to_tensor(fill)": Same(
        lambda x: x.to_tensor(7.5), lambda a: a.filled(7.5), lambda s: s.fillna(7.5), lambda a: pc.fill_null(a, 7.5)
    ),
    "x[mask]": Same(lambda x: x[x.get_mask()], lambda a: a.compressed(), lambda s: s.dropna(), lambda a: a.drop_null()),
    "x[condition]": Same(lambda x: x[x > 0], None, lambda s: s[s > 0], lambda a: a.filter(pc.greater(a, 0))),
    "diff": Same(lambda x: x.diff(), np.ma.diff, lambda s: s.diff()[1:], lambda a: pc.pairwise_diff(a)[1:]),
    "clamp": Same(lambda x: x.clamp(-1, 1), lambda a: a.clip(-1, 1), lambda s: s.clip(-1, 1)),
    "flip": Same(lambda x: x.flip(0), lambda a: a[::-1], lambda s: s[::-1], lambda a: a[::-1]),
    "cat": Same(
        lambda x: torch.cat([x, x]),
        lambda a: np.ma.concatenate([a, a]),
        lambda s: pd.concat([s, s]),
        lambda a: pa.concat_arrays([a, a]),
    ),
}


def rolling(name: str, least: int) -> Same:
    """A statistic of windows of three, each from where it is whole."""
    mine, theirs = getattr(md, name), name.removeprefix("a")
    return Same(
        lambda x: mine(x.unfold(0, 3, 1), 1, min_count=least) if len(x) > 2 else x[:0],
        None,
        lambda s: getattr(s.rolling(3, min_periods=least), theirs)()[2:],
    )


OF_ONE |= {f"rolling {n}, min_count={k}": rolling(n, k) for n in ("sum", "mean", "amin", "amax") for k in (1, 2, 3)}

OF_TWO: dict[str, Same] = {
    "add": Same(lambda x, y: x + y, np.ma.add, lambda s, t: s + t, pc.add),
    "sub": Same(lambda x, y: x - y, np.ma.subtract, lambda s, t: s - t, pc.subtract),
    "mul": Same(lambda x, y: x * y, np.ma.multiply, lambda s, t: s * t, pc.multiply),
    "div": Same(  # by what is never 0
        lambda x, y: x / (y + 0.25),
        lambda a, b: a / (b + 0.25),
        lambda s, t: s / (t + 0.25),
        lambda a, b: pc.divide(a, pc.add(b, 0.25)),
    ),
    "eq": Same(lambda x, y: x == y, lambda a, b: a == b, lambda s, t: s == t, pc.equal),
    "lt": Same(lambda x, y: x < y, lambda a, b: a < b, lambda s, t: s < t, pc.less),
    "maximum": Same(torch.maximum, np.ma.maximum, None, lambda a, b: pc.max_element_wise(a, b, skip_nulls=False)),
    "where": Same(
        lambda x, y: torch.where(x > 0, x, y),
        lambda a, b: np.ma.where(a > 0, a, b),
        None,
        lambda a, b: pc.if_else(pc.greater(a, 0), a, b),
    ),
    "logical_or": Same(
        lambda x, y: (x > 0).logical_or(y > 0),
        lambda a, b: np.ma.logical_or(a > 0, b > 0),
        None,
        lambda a, b: pc.or_(pc.greater(a, 0), pc.greater(b, 0)),
    ),
    "logical_and": Same(
        lambda x, y: (x > 0).logical_and(y > 0),
        lambda a, b: np.ma.logical_and(a > 0, b > 0),
        None,
        lambda a, b: pc.and_(pc.greater(a, 0), pc.greater(b, 0)),
    ),
    "accumulate": Same(
        md.accumulate,
        None,
        lambda s, t: s.add(t, fill_value=0),
        None,
    ),
    "cov": Same(
        lambda x, y: torch.cov(torch.stack([x, y]))[0, 1],
        lambda a, b: np.ma.cov(a, b)[0, 1],
        lambda s, t: s.cov(t),
        None,
        2,
    ),
    "corrcoef": Same(
        lambda x, y: torch.corrcoef(torch.stack([x, y]) + ramp(torch.arange, x))[0, 1],
        lambda a, b: np.ma.corrcoef(a + ramp(np.arange, a), b + ramp(np.arange, b))[0, 1],
        lambda s, t: (s + ramp(np.arange, s)).corr(t + ramp(np.arange, t)),
        None,
        2,
    ),
    "dot": Same(torch.dot, np.ma.dot, lambda s, t: (s * t).sum(min_count=1), lambda a, b: pc.sum(pc.multiply(a, b))),
}


def compared(name: str, row: Same, library: str, columns: list[Column]) -> None:
    """Compare the answers, if the columns have as many elements that are there as the row asks for."""
    if sum(None not in elements for elements in zip(*columns, strict=True)) >= row.least:
        compare(name, row, library, columns)


def compare(name: str, row: Same, library: str, columns: list[Column]) -> None:
    theirs = getattr(row, library)
    mine = answer(row.ours(*map(ours, columns)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy.ma's, of divisions by zero under the mask
        other = answer(theirs(*map(LIBRARIES[library], columns)))
    assert agree(mine, other), f"{name} of {columns}: {mine}, in {library} {other}"
