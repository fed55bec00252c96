"""matplotlib's functions draw `x.to_numpy()` with gaps, and `x` too, or name `to_numpy`; never what is hidden."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch

import masked_dispatch as md

matplotlib.use("agg")

from matplotlib import pyplot
from matplotlib.colors import to_rgba

T = np.arange(3.0)
HIDDEN = 77.0


@pytest.fixture(autouse=True)
def figures_are_closed() -> Iterator[None]:
    yield
    pyplot.close("all")


def line() -> md.MaskedTensor:
    return md.masked_tensor(torch.tensor([1.0, HIDDEN, 3.0]), torch.tensor([True, False, True]))


def image() -> md.MaskedTensor:
    return md.masked_tensor(
        torch.tensor([[1.0, HIDDEN, 3.0], [4.0, 5.0, HIDDEN]]), torch.tensor([[1, 0, 1], [1, 1, 0]])
    )


Draw = Callable[[Any, Callable[[md.MaskedTensor], Any]], Any]
DRAWN: dict[str, Draw] = {
    "imshow": lambda axes, given: axes.imshow(given(image())),
    "matshow": lambda axes, given: axes.matshow(given(image())),
    "pcolormesh": lambda axes, given: axes.pcolormesh(given(image())),
    "pcolormesh on a grid": lambda axes, given: axes.pcolormesh(np.arange(4), np.arange(3), given(image())),
    "contourf": lambda axes, given: axes.contourf(given(image())),
    "scatter": lambda axes, given: axes.scatter(T, given(line())),
    "scatter x": lambda axes, given: axes.scatter(given(line()), T),
    "scatter c": lambda axes, given: axes.scatter(T, T, c=given(line())),
    "scatter s": lambda axes, given: axes.scatter(T, T, s=given(line())),
    "bar": lambda axes, given: axes.bar(T, given(line())),
    "barh": lambda axes, given: axes.barh(T, given(line())),
    "errorbar": lambda axes, given: axes.errorbar(T, given(line())),
    "errorbar yerr": lambda axes, given: axes.errorbar(T, T, yerr=given(line())),
    "fill_between": lambda axes, given: axes.fill_between(T, given(line())),
    "fill_between y2": lambda axes, given: axes.fill_between(T, T, given(line())),
    "vlines": lambda axes, given: axes.vlines(T, 0, given(line())),
    "stairs": lambda axes, given: axes.stairs(given(line())),
    "plot": lambda axes, given: axes.plot(T, given(line())),
    "step": lambda axes, given: axes.step(T, given(line())),
}
SERVED = {"plot", "step"}


@pytest.mark.parametrize("name", DRAWN)
def test_a_masked_tensor_is_drawn_or_to_numpy_is_named(name: str) -> None:
    _, axes = pyplot.subplots()
    if name in SERVED:
        DRAWN[name](axes, lambda x: x)
        return
    # Of colours, matplotlib drops the reason why they are no numbers.
    named = "argument must be a color" if name == "scatter c" else r"x\.to_numpy\(\), a masked array of NumPy"
    with pytest.raises(ValueError, match=named):
        DRAWN[name](axes, lambda x: x)


# NumPy says so for each masked number in a list, as matplotlib makes it of the heights of bars.
@pytest.mark.filterwarnings("ignore:Warning. converting a masked element to nan")
@pytest.mark.parametrize("name", DRAWN)
def test_to_numpy_is_drawn_and_nothing_hidden_is(name: str) -> None:
    figure, axes = pyplot.subplots()
    DRAWN[name](axes, lambda x: x.to_numpy())
    figure.canvas.draw()
    assert (
        not {"imshow", "matshow"} & {name} or axes.images[0].get_array().mask.tolist() == (~image().get_mask()).tolist()
    )
    assert max(*axes.get_xlim(), *axes.get_ylim()) < 10
    for shown in (*axes.images, *axes.collections):
        if shown.get_array() is not None:
            assert float(shown.get_array().max()) < 10


def test_pixels_of_invalid_elements_take_the_colour_of_bad_values() -> None:
    from masked_dispatch.tensor.printing import INVALID

    _, axes = pyplot.subplots()
    shown = axes.imshow(image().to_numpy(), cmap=matplotlib.colormaps["viridis"].with_extremes(bad=INVALID))
    colours = shown.to_rgba(shown.get_array())
    assert np.allclose(colours[0, 1], to_rgba(INVALID))
    assert not np.allclose(colours[0, 0], to_rgba(INVALID))


def test_where_everything_is_valid_it_is_drawn() -> None:
    for draw in DRAWN.values():
        figure, axes = pyplot.subplots()
        draw(axes, lambda x: md.masked_tensor(x.get_data().clamp(max=5)))
        figure.canvas.draw()


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float32])
def test_statistics_are_those_of_valid_elements(dtype: torch.dtype) -> None:
    """No zero stands for an invalid integer where matplotlib ignores a mask."""
    x = md.masked_tensor(torch.tensor([1, 2, 3, 4, 1]).to(dtype), torch.tensor([1, 0, 1, 1, 0]).bool())
    valid = x.compressed().double().numpy()
    _, axes = pyplot.subplots()
    assert axes.hist(x, bins=[-0.5, 0.5, 1.5, 2.5, 3.5, 4.5])[0].tolist() == [
        *(0, int((valid == 1).sum()), 0, int((valid == 3).sum()), int((valid == 4).sum()))
    ]
    columns = md.masked_tensor(torch.stack([x.get_data(), x.get_data()], 1), torch.stack([x.get_mask()] * 2, 1))
    assert all(counts.sum() == 3 for counts in axes.hist(columns)[0])
    assert axes.boxplot(x)["medians"][0].get_ydata()[0] == np.median(valid)
    assert axes.violinplot(x)["cmins"].get_segments()[0][0][1] == 1
    assert x.to_numpy().dtype == x.get_data().numpy().dtype
