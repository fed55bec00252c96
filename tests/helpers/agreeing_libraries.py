"""Columns with missing numbers in numpy.ma, pandas, pyarrow and here, and the functions of them on which all agree."""

from __future__ import annotations

import math
import re
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


def there(a: Any) -> int:
    return len(a) - a.null_count


# ------------------------------------------------------------------------------------------------- where they coincide

# A function's name | here, of x | in numpy.ma, of a | in pandas, of s | in pyarrow, of a | `least`, if it is not 0.
TABLE_OF_ONE = """
count | x.count() | a.count() | s.count() | pc.count(a)
sum | x.sum() | a.sum() | s.sum(min_count=1) | pc.sum(a)
sum, min_count=0 | md.sum(x, min_count=0) | | s.sum() | pc.sum(a, min_count=0)
sum, min_count=3 | md.sum(x, min_count=3) | | s.sum(min_count=3) | pc.sum(a, min_count=3)
sum, skipna=False | md.sum(x, skipna=False) | | s.sum(skipna=False) | pc.sum(a, skip_nulls=False)
prod | x.prod() | a.prod() | s.prod(min_count=1) | pc.product(a)
prod, min_count=0 | md.prod(x, min_count=0) | | s.prod() | pc.product(a, min_count=0)
mean | x.mean() | a.mean() | s.mean() | pc.mean(a)
mean, skipna=False | md.mean(x, skipna=False) | | s.mean(skipna=False) | pc.mean(a, skip_nulls=False)
mean, min_count=2 | md.mean(x, min_count=2) | | | pc.mean(a, min_count=2)
var, correction=0 | x.var(correction=0) | a.var() | s.var(ddof=0) | pc.variance(a, ddof=0)
var | x.var() | a.var(ddof=1) | s.var() | pc.variance(a, ddof=1) | 2
std | x.std() | a.std(ddof=1) | s.std() | pc.stddev(a, ddof=1) | 2
amin | x.amin() | a.min() | s.min() | pc.min(a)
amax | x.amax() | a.max() | s.max() | pc.max(a)
amin, skipna=False | md.amin(x, skipna=False) | | s.min(skipna=False) | pc.min(a, skip_nulls=False)
argmin | x.argmin() | a.argmin() | s.argmin() | pc.index(a, pc.min(a)) | 1
argmax | x.argmax() | a.argmax() | s.argmax() | pc.index(a, pc.max(a)) | 1
quantile(0.5) | x.quantile(0.5) | np.ma.median(a) | s.median() | pc.quantile(a, 0.5)[0]
quantile(0.3) | x.quantile(0.3) | | s.quantile(0.3) | pc.quantile(a, 0.3)[0]
quantile, lower | by(x.quantile, "lower") | | by(s.quantile, "lower") | by(pc.quantile, "lower", a)[0]
quantile, higher | by(x.quantile, "higher") | | by(s.quantile, "higher") | by(pc.quantile, "higher", a)[0]
quantile, midpoint | by(x.quantile, "midpoint") | | by(s.quantile, "midpoint") | by(pc.quantile, "midpoint", a)[0]
quantile, nearest | by(x.quantile, "nearest") | | by(s.quantile, "nearest") | by(pc.quantile, "nearest", a)[0]
median | x.median() | | | pc.quantile(a, 0.5, interpolation="lower")[0]
mode | x.mode().values | | s.mode()[0] | pc.mode(a)[0]["mode"] | 1
cumsum | x.cumsum(0) | a.cumsum() | s.cumsum() | pc.cumulative_sum(a, skip_nulls=True)
cumprod | x.cumprod(0) | a.cumprod() | s.cumprod() | pc.cumulative_prod(a, skip_nulls=True)
cummax | x.cummax(0).values | | s.cummax() | pc.cumulative_max(a, skip_nulls=True)
cummin | x.cummin(0).values | | s.cummin() | pc.cumulative_min(a, skip_nulls=True)
cumsum, skipna=False | md.cumsum(x, 0, skipna=False) | | s.cumsum(skipna=False) | pc.cumulative_sum(a)
cummax, skipna=False | md.cummax(x, 0, skipna=False).values | | s.cummax(skipna=False) | pc.cumulative_max(a)
sort | x.sort().values | np.ma.sort(a) | s.sort_values() | sorted_by(a, "ascending")
sort, descending | x.sort(descending=True).values | | s.sort_values(ascending=False) | sorted_by(a, "descending")
argsort | x.argsort(stable=True)[: int(x.count())] | np.ma.argsort(a, kind="stable")[: a.count()]
    | s.sort_values(kind="stable").index[: s.count()].to_numpy()
    | sorted_by(a, "ascending", indices=True)[: there(a)]
topk | x.topk(2).values | | s.nlargest(2) | a.take(pc.top_k_unstable(a, 2)) | 2
kthvalue | x.kthvalue(2).values | | s.nsmallest(2).iloc[1] | | 2
unique | x.unique() | np.unique(a.compressed()) | s.dropna().sort_values().unique() | pc.unique(a.drop_null()).sort()
unique, how many | len(x.unique()) | | s.nunique() | pc.count_distinct(a, mode="only_valid")
any | (x > 0).any() | (a > 0).any() | | pc.any(pc.greater(a, 0))
any, min_count=0 | md.any(x > 0, min_count=0) | | (s > 0).any() | pc.any(pc.greater(a, 0), min_count=0)
all | (x > 0).all() | (a > 0).all() | | pc.all(pc.greater(a, 0))
all, min_count=0 | md.all(x > 0, min_count=0) | | (s > 0).all() | pc.all(pc.greater(a, 0), min_count=0)
exp | x.exp() | np.ma.exp(a) | np.exp(s) | pc.exp(a)
abs | x.abs() | abs(a) | abs(s) | pc.abs(a)
to_tensor(fill) | x.to_tensor(7.5) | a.filled(7.5) | s.fillna(7.5) | pc.fill_null(a, 7.5)
x[mask] | x[x.get_mask()] | a.compressed() | s.dropna() | a.drop_null()
x[condition] | x[x > 0] | | s[s > 0] | a.filter(pc.greater(a, 0))
diff | x.diff() | np.ma.diff(a) | s.diff()[1:] | pc.pairwise_diff(a)[1:]
clamp | x.clamp(-1, 1) | a.clip(-1, 1) | s.clip(-1, 1)
flip | x.flip(0) | a[::-1] | s[::-1] | a[::-1]
cat | torch.cat([x, x]) | np.ma.concatenate([a, a]) | pd.concat([s, s]) | pa.concat_arrays([a, a])
"""

# The same of two columns: x and y, a and b, s and t.
TABLE_OF_TWO = """
add | x + y | np.ma.add(a, b) | s + t | pc.add(a, b)
sub | x - y | np.ma.subtract(a, b) | s - t | pc.subtract(a, b)
mul | x * y | np.ma.multiply(a, b) | s * t | pc.multiply(a, b)
div, by what is never 0 | x / (y + 0.25) | a / (b + 0.25) | s / (t + 0.25) | pc.divide(a, pc.add(b, 0.25))
eq | x == y | a == b | s == t | pc.equal(a, b)
lt | x < y | a < b | s < t | pc.less(a, b)
maximum | torch.maximum(x, y) | np.ma.maximum(a, b) | | pc.max_element_wise(a, b, skip_nulls=False)
where | torch.where(x > 0, x, y) | np.ma.where(a > 0, a, b) | | pc.if_else(pc.greater(a, 0), a, b)
logical_or | (x > 0).logical_or(y > 0) | np.ma.logical_or(a > 0, b > 0) | | pc.or_(pc.greater(a, 0), pc.greater(b, 0))
logical_and | (x > 0).logical_and(y > 0) | np.ma.logical_and(a > 0, b > 0)
    | | pc.and_(pc.greater(a, 0), pc.greater(b, 0))
accumulate | md.accumulate(x, y) | | s.add(t, fill_value=0)
cov | torch.cov(torch.stack([x, y]))[0, 1] | np.ma.cov(a, b)[0, 1] | s.cov(t) | | 2
corrcoef | torch.corrcoef(torch.stack([x, y]) + ramp(x))[0, 1] | np.ma.corrcoef(a + ramp(a), b + ramp(b))[0, 1]
    | (s + ramp(s)).corr(t + ramp(t)) | | 2
dot | torch.dot(x, y) | np.ma.dot(a, b) | (s * t).sum(min_count=1) | pc.sum(pc.multiply(a, b))
"""


def by(quantile: Callable[..., Any], interpolation: str, *of: Any) -> Any:
    return quantile(*of, 0.3, interpolation=interpolation)


def ramp(column: Any) -> Any:
    """Something to add so that no column is constant."""
    return (torch if md.is_masked_tensor(column) else np).arange(len(column)) / 64


def rows_of(table: str) -> dict[str, Same]:
    """The rows of a table by name; a row goes on in lines that are indented."""

    def row(ours: str, numpy: str = "", pandas: str = "", arrow: str = "", least: str = "0") -> Same:
        cells = zip(("x, y", "a, b", "s, t", "a, b"), (ours, numpy, pandas, arrow), strict=True)
        functions = [eval(f"lambda {names}=None: {cell}", globals()) if cell else None for names, cell in cells]
        return Same(*functions, int(least))

    rows = re.sub(r"\n +", " ", table.strip()).splitlines()
    return {name: row(*cells) for name, *cells in ([*map(str.strip, line.split("|"))] for line in rows)}


def rolling(name: str, least: int) -> Same:
    """A statistic of windows of three, each from where it is whole."""
    mine, theirs = getattr(md, name), name.removeprefix("a")
    return Same(
        lambda x: mine(x.unfold(0, 3, 1), 1, min_count=least) if len(x) > 2 else x[:0],
        None,
        lambda s: getattr(s.rolling(3, min_periods=least), theirs)()[2:],
    )


OF_TWO = rows_of(TABLE_OF_TWO)
OF_ONE = rows_of(TABLE_OF_ONE) | {
    f"rolling {n}, min_count={k}": rolling(n, k) for n in ("sum", "mean", "amin", "amax") for k in (1, 2, 3)
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
