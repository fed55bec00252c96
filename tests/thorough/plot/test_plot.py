"""md.plot.mask draws the mask, the counts of rows and columns, and nothing else; of a tensor of any size."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import matplotlib
import pytest
import torch
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import StepPatch

import masked_dispatch as md
from op_registry import MaskedSemanticsError
from storages import LAYOUTS

matplotlib.use("agg")

from matplotlib import pyplot


@pytest.fixture(autouse=True)
def figures_are_closed() -> Iterator[None]:
    yield
    pyplot.close("all")


def holey(*shape: int) -> md.MaskedTensor:
    data = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    return md.masked_tensor(torch.where(data % 3 != 0, data, float("nan")), data % 3 != 0)


def drawn(figure: Any, kind: type) -> list[Any]:
    return [artist for axes in figure.axes for artist in axes.get_children() if isinstance(artist, kind)]


def picture(figure: Any) -> torch.Tensor:
    (image,) = drawn(figure, AxesImage)
    return torch.from_numpy(image.get_array().filled().copy())


def counts(figure: Any) -> list[list[float]]:
    """Of each column, then of each row."""
    return [step.get_data().values.tolist() for step in drawn(figure, StepPatch)]


@pytest.mark.parametrize("layout", [torch.strided, *LAYOUTS], ids=str)
def test_it_is_the_mask_with_its_counts(layout: torch.layout) -> None:
    x = holey(4, 6)
    stored = x.to_layout(layout, blocksize=(2, 3) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None)
    figure = md.plot.mask(stored)
    assert torch.equal(picture(figure), x.get_mask().double())
    assert counts(figure) == [x.count(0).tolist(), x.count(1).tolist()]
    assert f"(4, 6), float32, stored as {layout}\n16 of 24 valid (66.7%)" == figure.get_suptitle()
    figure.canvas.draw()


def test_a_packed_batch_is_drawn_as_its_padded_one() -> None:
    x = md.from_lengths(torch.rand(3, 4), torch.tensor([4, 1, 2]))
    padded, packed = (md.plot.mask(tensor) for tensor in (x, x.to_packed()))
    for mine, other in zip(drawn(packed, AxesImage), drawn(padded, AxesImage), strict=True):
        assert torch.equal(*(torch.from_numpy(image.get_array().filled(-1).copy()) for image in (mine, other)))
    assert counts(packed) == counts(padded)


def test_a_plain_tensor_is_valid_everywhere() -> None:
    assert torch.equal(picture(md.plot.mask(torch.zeros(2, 3))), torch.ones(2, 3).double())


@pytest.mark.parametrize(("row_dims", "matrix"), [(None, (6, 36)), (0, (1, 216)), (1, (6, 36)), (2, (54, 4))])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_dimensions_are_flattened_and_the_axes_say_which(
    packed: bool, row_dims: int | None, matrix: tuple[int, int]
) -> None:
    x = md.from_lengths(torch.rand(6, 9, 4), torch.tensor([9, 3, 4, 1, 7, 5])).without_extent()
    figure = md.plot.mask(x.to_packed().without_extent() if packed else x, row_dims=row_dims)
    assert torch.equal(picture(figure), x.get_mask().reshape(matrix).double())
    (axes,) = [axes for axes in figure.axes if axes.get_images()]
    labels = {
        0: ("", "dimensions 0 · 1 · 2, flattened (6 · 9 · 4)"),
        1: ("dimension 0", "dimensions 1 · 2, flattened (9 · 4)"),
        2: ("dimensions 0 · 1, flattened (6 · 9)", "dimension 2"),
    }
    assert (axes.get_ylabel(), axes.get_xlabel()) == labels[1 if row_dims is None else row_dims]
    lines = {0: 5, 1: 8, 2: 5}[1 if row_dims is None else row_dims]
    assert len(drawn(figure, Line2D)) == lines


@pytest.mark.parametrize("shape", [(), (50,), (50, 1), (1, 1, 1)], ids=str)
def test_one_row_or_column_needs_no_counts(shape: tuple[int, ...]) -> None:
    figure = md.plot.mask(holey(*shape))
    assert counts(figure) == []
    assert picture(figure).numel() == holey(*shape).numel()
    figure.canvas.draw()


@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_csr], ids=str)
def test_large_tensors_are_drawn_by_blocks(layout: torch.layout) -> None:
    triangle = torch.arange(1000)[:, None] >= torch.arange(1200)
    figure = md.plot.mask(md.masked_tensor(torch.ones(1000, 1200), triangle).to_layout(layout))
    shares = picture(figure)
    assert shares.shape == (334, 400)
    padded = torch.nn.functional.pad(triangle.double(), (0, 0, 0, 2))
    heights = torch.tensor([3.0] * 333 + [1.0]).double()
    torch.testing.assert_close(shares, padded.reshape(334, 3, 400, 3).sum((1, 3)) / (heights[:, None] * 3))
    of_columns, of_rows = counts(figure)
    assert of_columns[0] == 999.0  # the mean of 1000, 999 and 998
    assert of_rows[-1] == 1000.0
    assert "blocks of 3 × 3" in figure.axes[-1].get_xlabel()
    figure.canvas.draw()


def test_what_no_machine_could_store_is_drawn() -> None:
    indices = torch.tensor([[0, 2**20 - 1], [1, 2**30 - 1]])
    stored = torch.sparse_coo_tensor(indices, torch.ones(2), (2**20, 2**30), is_coalesced=True, check_invariants=True)
    shares = picture(md.plot.mask(md.as_masked_tensor(stored)))
    assert shares.nonzero().tolist() == [[0, 0], [399, 399]]


def test_it_draws_into_a_figure_that_it_is_given() -> None:
    given = pyplot.figure()
    assert md.plot.mask(holey(2, 3), figure=given) is given
    assert pyplot.get_fignums() == [given.number]


def test_what_cannot_be_drawn() -> None:
    with pytest.raises(ValueError, match=r"nothing to draw: a tensor of shape \(0, 3\) has no elements"):
        md.plot.mask(torch.zeros(0, 3))
    with pytest.raises(ValueError, match=r"row_dims=3, but a tensor of shape \(2, 3\) has 2 dimensions"):
        md.plot.mask(holey(2, 3), row_dims=3)
    with pytest.raises(MaskedSemanticsError, match=r"shape \(2,\) on meta has none here"):
        md.plot.mask(md.as_masked_tensor(torch.empty(2, device="meta")))


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"needs matplotlib, .*: pip install 'masked-dispatch\[plot\]'"):
        md.plot.mask(holey(2, 3))


def test_matplotlib_is_loaded_on_use() -> None:
    program = "import sys, masked_dispatch; print('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"
