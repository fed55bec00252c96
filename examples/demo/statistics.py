"""1. Masked statistics of the weekly CO₂ record, next to pandas, which skips NaN by default."""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch

import masked_dispatch as md
from examples.demo.console import say, table
from examples.demo.data import weekly_co2

YEAR = 52


def by_year(series: pd.Series) -> pd.DataFrame:
    """One row for each year, one column for each of its weeks; NaN where a week is absent or was not measured."""
    calendar = pd.DataFrame({"year": series.index.year, "ppm": series.to_numpy()})
    calendar["week"] = calendar.groupby("year").cumcount()
    return calendar.pivot(index="year", columns="week", values="ppm")


def comparisons(series: pd.Series) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """(what, masked_dispatch, pandas): numbers, or arrays with NaN where nothing is valid."""
    x = md.from_nan(torch.from_numpy(series.to_numpy(copy=True)))
    weeks = x.unfold(0, YEAR, 1)  # [n - 51, 52]: every stretch of 52 weeks
    years = md.from_nan(torch.from_numpy(by_year(series).to_numpy(copy=True)))

    rolling = series.rolling(YEAR, min_periods=1)
    pandas_years = series.groupby(series.index.year)
    pairs = [
        ("valid weeks", x.count(), series.count()),
        ("mean", x.mean(), series.mean()),
        ("std", x.std(), series.std()),
        ("median", x.quantile(0.5), series.median()),
        ("minimum", x.amin(), series.min()),
        ("maximum", x.amax(), series.max()),
        (f"mean of every {YEAR} weeks", weeks.mean(-1), rolling.mean()[YEAR - 1 :]),
        (f"std of every {YEAR} weeks", weeks.std(-1), rolling.std()[YEAR - 1 :]),
        ("mean of every year", years.mean(1), pandas_years.mean()),
        ("std of every year", years.std(1), pandas_years.std()),
    ]
    return [(what, as_array(ours), np.asarray(theirs, dtype=np.float64)) for what, ours, theirs in pairs]


def as_array(x: torch.Tensor) -> np.ndarray:
    """A result as a NumPy array, NaN where it is invalid."""
    return (x.to_tensor(float("nan")) if md.is_masked_tensor(x) else x).double().numpy()


def show() -> None:
    series = weekly_co2()
    missing = int(series.isna().sum())
    say(f"{len(series)} weeks from {series.index[0]:%Y-%m-%d} to {series.index[-1]:%Y-%m-%d}, {missing} missing")
    rows = []
    for what, ours, theirs in comparisons(series):
        difference = float(np.abs(ours - theirs).max())
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, err_msg=what)
        if ours.ndim:
            rows.append([what, f"{ours[0]:.6f} … {ours[-1]:.6f}", f"{theirs[0]:.6f} … {theirs[-1]:.6f}", difference])
        else:
            rows.append([what, f"{ours:.6f}", f"{theirs:.6f}", difference])
    table(("CO₂, ppm", "masked_dispatch", "pandas, skipna", "largest difference"), rows)
