"""Real data with holes, both sets shipped inside PyPI packages: nothing is downloaded.

The weekly record has holes of its own: 59 weeks in which nobody measured. They lie mostly in its first years, so the
experiments add *outages*: stretches of weeks (or pixels) that are hidden from every competitor, and whose true values
are used only to measure errors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from sklearn.datasets import load_digits
from statsmodels.datasets import co2
from torch import Tensor

NAN = float("nan")


def weekly_co2() -> pd.Series:
    """Atmospheric CO₂ above Mauna Loa in ppm by volume, weekly from 1958 to 2001; NaN where nobody measured."""
    return co2.load_pandas().data["co2"]


def outages(weeks: int, share: float, longest: int, seed: int) -> np.ndarray:
    """bool [weeks], True inside stretches of 1 to `longest` weeks that cover about `share` of all weeks."""
    rng = np.random.default_rng(seed)
    hidden = np.zeros(weeks, dtype=bool)
    while hidden.mean() < share:
        start, length = rng.integers(weeks), rng.integers(1, longest + 1)
        hidden[start : start + length] = True
    return hidden


@dataclass(frozen=True)
class Windows:
    """Stretches of a record, each with the stretch that follows it.

    past      [n, length], standardised; NaN where missing or hidden
    future    [n, horizon], standardised; NaN where missing or hidden
    truth     [n, horizon], standardised; NaN only where nobody measured; for measuring errors, never for training
    starts    the row of the record at which each window begins
    """

    past: Tensor
    future: Tensor
    truth: Tensor
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.past)


@dataclass(frozen=True)
class Forecasting:
    """Training windows, later held-out windows, and the scale of both (ppm = z · std + mean)."""

    train: Windows
    held_out: Windows
    mean: float
    std: float
    hidden: int


def forecasting_data(length: int = 52, horizon: int = 13, share: float = 0.3, until: int = 1990) -> Forecasting:
    """Windows of the weekly record; those that end before the year `until` are for training."""
    series = weekly_co2()
    truth = series.to_numpy()
    hidden = outages(len(truth), share, longest=8, seed=0)
    seen = np.where(hidden, NAN, truth)

    last_training_row = int((series.index.year < until).sum())
    mean, std = float(np.nanmean(seen[:last_training_row])), float(np.nanstd(seen[:last_training_row]))

    def cut(starts: np.ndarray) -> Windows:
        rows = starts[:, None] + np.arange(length + horizon)
        observed, measured = ((record[rows] - mean) / std for record in (seen, truth))
        as_tensor = [torch.tensor(a, dtype=torch.float32) for a in (observed, measured)]
        return Windows(as_tensor[0][:, :length], as_tensor[0][:, length:], as_tensor[1][:, length:], starts)

    span = length + horizon
    return Forecasting(
        train=cut(np.arange(0, last_training_row - span + 1, 2)),
        held_out=cut(np.arange(last_training_row, len(truth) - span + 1, 4)),
        mean=mean,
        std=std,
        hidden=int((hidden & ~np.isnan(truth)).sum()),
    )


@dataclass(frozen=True)
class Digits:
    """Handwritten digits, [n, 1, 8, 8], grey levels from 0 to 1.

    train, held_out                what is seen: NaN at missing pixels
    train_truth, held_out_truth    the complete digits; for measuring errors, never for training
    """

    train: Tensor
    held_out: Tensor
    train_truth: Tensor
    held_out_truth: Tensor


def digits_data(share: float = 0.4, held_out: int = 360) -> Digits:
    """scikit-learn's 1797 digits in a fixed random order, each pixel missing with probability `share`."""
    rng = np.random.default_rng(0)
    images = load_digits().images[:, None] / 16
    images = images[rng.permutation(len(images))]
    missing = rng.random(images.shape) < share
    truth = torch.tensor(images, dtype=torch.float32)
    seen = torch.where(torch.tensor(missing), NAN, truth)
    return Digits(seen[:-held_out], seen[-held_out:], truth[:-held_out], truth[-held_out:])
