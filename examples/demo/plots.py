"""4. The pictures, as PNG files."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from examples.demo.data import weekly_co2
from examples.demo.digits import Restored
from examples.demo.forecasting import Forecasts
from masked_dispatch.tensor.printing import INVALID, VALID

BLUE, ORANGE, GREY = "#1f5fa8", "#d9661f", "#9a9a9a"


def draw(forecasts: Forecasts, restored: Restored, folder: Path) -> list[Path]:
    """Write every picture into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {
        "co2_series": co2_series(forecasts),
        "digits": digits(restored),
        "masks": masks(forecasts, restored),
    }
    written = []
    for name, figure in figures.items():
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=130)
        plt.close(figure)
        written.append(path)
    return written


def co2_series(forecasts: Forecasts) -> Figure:
    """The record with its gaps; below, held-out years with what was hidden, and forecasts made from the rest."""
    series = weekly_co2()
    data, windows = forecasts.data, forecasts.data.held_out
    figure, (whole, part) = plt.subplots(2, 1, figsize=(11, 8), layout="constrained")

    whole.plot(series.index, series, color=BLUE, lw=0.9, label="measured")
    holes = series.index[series.isna()]
    low, high = whole.get_ylim()
    whole.vlines(holes, low, high, color=INVALID, lw=1, zorder=0, label=f"{len(holes)} weeks missing")
    whole.set_ylim(low, high)
    whole.set(title="Weekly CO₂ above Mauna Loa, with its gaps", ylabel="ppm")
    whole.legend(loc="lower right", frameon=False)

    length, horizon = windows.past.shape[1], windows.future.shape[1]
    first, last = int(windows.starts[0]), int(windows.starts[-1]) + length + horizon
    shown = slice(first, min(first + 4 * 52 + horizon, last))
    part.plot(series.index[shown], series.iloc[shown], color=GREY, lw=1, label="measured")
    seen = np.full(len(series), np.nan)
    for start, past in zip(windows.starts, windows.past.numpy(), strict=True):
        seen[start : start + length] = past * data.std + data.mean
    part.plot(series.index[shown], seen[shown], ".", color=BLUE, ms=4, label="seen by the model (the rest is masked)")
    label = f"forecast of {horizon} weeks from the {length} before"
    for start, predicted in zip(windows.starts, forecasts.predicted.numpy(), strict=True):
        rows = slice(start + length, start + length + horizon)
        if rows.stop <= shown.stop and (start - first) % (horizon - horizon % 4) == 0:
            part.plot(series.index[rows], predicted * data.std + data.mean, color=ORANGE, lw=2, label=label)
            label = "_another"
    part.set(title="Held-out years: what the masked Transformer saw, and what it forecast", ylabel="ppm")
    part.legend(loc="upper left", frameon=False)
    for axes in (whole, part):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def digits(restored: Restored, count: int = 12) -> Figure:
    """Held-out digits: true, as the model saw them, and restored."""
    data = restored.data
    rows = (
        ("true", data.held_out_truth),
        ("seen", data.held_out),
        ("restored", restored.restored),
    )
    figure, grid = plt.subplots(3, count, figsize=(count, 3.4), layout="constrained")
    shades = plt.get_cmap("Blues").with_extremes(bad=INVALID)
    for (name, images), line in zip(rows, grid, strict=True):
        for axes, image in zip(line, images[:count, 0].numpy(), strict=True):
            axes.imshow(np.ma.masked_invalid(image), cmap=shades, vmin=0, vmax=1)
            axes.set(xticks=[], yticks=[])
        line[0].set_ylabel(name)
    figure.suptitle("Held-out digits before and after; missing pixels in grey")
    return figure


def masks(forecasts: Forecasts, restored: Restored) -> Figure:
    """The masks themselves: training windows by week, and one held-out digit after another."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5), layout="constrained")
    colours = ListedColormap([INVALID, VALID])
    past = ~forecasts.data.train.past.isnan().numpy()
    left.imshow(past, cmap=colours, aspect="auto", interpolation="nearest", vmin=0, vmax=1)
    left.set(title="Mask of the training windows", xlabel="week of the window", ylabel="window, by date")
    seen = ~restored.data.held_out[:100, 0].isnan().numpy()
    tiled = seen.reshape(10, 10, 8, 8).transpose(0, 2, 1, 3).reshape(80, 80)
    right.imshow(tiled, cmap=colours, interpolation="nearest", vmin=0, vmax=1)
    right.set(title="Masks of 100 held-out digits", xticks=np.arange(-0.5, 80, 8), yticks=np.arange(-0.5, 80, 8))
    right.grid(color="white", lw=1.5)
    right.tick_params(length=0, labelbottom=False, labelleft=False)
    figure.suptitle("True (valid) is blue, False (invalid) is grey")
    return figure
