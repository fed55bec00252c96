"""2a. An unmodified Transformer forecasts the CO₂ record: masked, and with holes filled in the two usual ways."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from examples.demo.competition import MASKED, MASKED_COMPILED, Competitor, Prepare, compete, filled
from examples.demo.console import say
from examples.demo.data import Forecasting, forecasting_data
from examples.demo.models import Forecaster
from examples.demo.training import predict, rows_of_batches


def zeros_in_holes(x: Tensor) -> Tensor:
    """Fill every hole with 0, which is the mean of all years, because the record is standardised."""
    return x.nan_to_num(0.0)


def means_in_holes(x: Tensor) -> Tensor:
    """Fill every hole with the mean of its window, or with 0 where the window is empty."""
    return torch.where(x.isnan(), x.nanmean(-1, keepdim=True).nan_to_num(0.0), x)


COMPETITORS = (
    MASKED,
    MASKED_COMPILED,
    Competitor("zeros in the holes", zeros_in_holes),
    Competitor("means in the holes", means_in_holes),
)


def forecast(model: nn.Module, data: Forecasting, prepare: Prepare) -> Tensor:
    """The forecast for every held-out window, [n, horizon], as a plain tensor."""
    return filled(predict(model, prepare(data.held_out.past)))


def error_in_ppm(predicted: Tensor, data: Forecasting) -> float:
    """Mean absolute error over every held-out week that was measured, whether hidden or not."""
    truth = data.held_out.truth
    measured = ~truth.isnan()
    return float((predicted - truth)[measured].abs().mean()) * data.std


@dataclass(frozen=True)
class Forecasts:
    """What the plots show: the data, and the masked model's forecast for each held-out window."""

    data: Forecasting
    predicted: Tensor


def show(epochs: int = 12) -> Forecasts:
    data = forecasting_data()
    windows = data.train
    batches = [(windows.past[rows], windows.future[rows]) for rows in rows_of_batches(len(windows), 64, epochs)]
    say(
        f"Transformer: 52 weeks → the next 13; {len(windows)} windows before 1990 to train on, "
        f"{len(data.held_out)} later ones held out.\n{data.hidden} measured weeks are hidden in addition to the "
        f"missing ones: {float(windows.past.isnan().float().mean()):.0%} of the values in the windows are NaN."
    )
    runs = compete(
        "Transformer",
        Forecaster,
        COMPETITORS,
        batches,
        lambda model, prepare: error_in_ppm(forecast(model, data, prepare), data),
        unit="ppm",
    )
    return Forecasts(data, forecast(runs[MASKED.name].model, data, MASKED.prepare))
