"""Pictures of masks, by matplotlib: the extra `plot`, loaded when a function is called.

`mask(x)` reads a mask block by block, with a bounded number of blocks: from dense storage some rows at a time, from
sparse and packed storage the stored elements only.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.printing import INVALID, NOT_THERE, VALID, is_readable, share_of
from masked_dispatch.tensor.shown import ValidityBlocks, validity_blocks
from masked_dispatch.torch_internals import plainly
from op_registry import MaskedSemanticsError
from op_registry.records.dense import Dense

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["mask"]


def __dir__() -> list[str]:
    return [*__all__]


# The most blocks that are drawn, down and across; more would be smaller than a pixel.
MOST_BLOCKS = 400
# The most lines that are drawn between the slices of a dimension.
MOST_LINES = 40
COUNTS = "#8fb3e3"


def mask(x: Tensor, *, row_dims: int | None = None, figure: Figure | None = None) -> Figure:
    """Draw where `x` is valid, with the number of valid elements of each row beside it, and of each column above.

    x         a tensor in any storage; a plain one is valid everywhere
    row_dims  number of leading dimensions that run down, flattened; the others run across. None: the first of a matrix,
              none of a vector, and of more dimensions those with which the picture is nearest to a square. Thin lines
              separate the slices of flattened dimensions
    figure    the figure to draw in; None: a new one of pyplot

    A tensor of more than 400 rows or columns is drawn in blocks: their colour is their valid share, and counts are
    means over the rows or columns of a block. Positions that are not there (see :func:`masked_dispatch.padded`) are
    blank, and shares are of what is there.

    Raises ImportError without matplotlib, ValueError for a tensor without elements or `row_dims` out of range, and
    MaskedSemanticsError where there is no mask to look at (on meta, while tracing).
    """
    record = x._printed_record if isinstance(x, MaskedTensor) else Dense(x.detach(), None)
    if isinstance(x, MaskedTensor) and not is_readable(x, record):
        raise MaskedSemanticsError(
            f"plot.mask reads the values of a mask, and a masked tensor of shape {tuple(x.shape)} on {x.device} has "
            "none here: draw it outside of transforms and compiled functions, on a device other than meta"
        )
    if not x.numel():
        raise ValueError(f"plot.mask has nothing to draw: a tensor of shape {tuple(x.shape)} has no elements")
    if row_dims is not None and not 0 <= row_dims <= x.ndim:
        raise ValueError(f"row_dims={row_dims}, but a tensor of shape {tuple(x.shape)} has {x.ndim} dimensions")
    matplotlib = _matplotlib()
    with plainly():
        blocks = validity_blocks(record, MOST_BLOCKS, MOST_BLOCKS, row_dims)
    if figure is None:
        figure = matplotlib["pyplot"].figure(figsize=_size_of(blocks), layout="constrained")
    _draw(x, blocks, figure, matplotlib)
    return figure


def _matplotlib() -> dict[str, Any]:
    """The modules of matplotlib that are used, by name."""
    try:
        from matplotlib import colors, patches, pyplot, ticker
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "matplotlib":
            raise
        raise ImportError(
            "masked_dispatch.plot needs matplotlib, which is not installed: pip install 'masked-dispatch[plot]'",
            name="matplotlib",
        ) from error
    return {"colors": colors, "patches": patches, "pyplot": pyplot, "ticker": ticker}


def _size_of(blocks: ValidityBlocks) -> tuple[float, float]:
    """Width and height of the figure in inches: as wide and high as the matrix, within limits."""
    rows, columns = blocks.shape
    if min(rows, columns) == 1:
        return (3.0, 6.5) if rows > columns else (7.0 if columns > 1 else 3.0, 1.9)
    height = min(max(5.5 * rows / columns, 0.5), 6.5)
    width = min(max(6.5 * columns / rows, 2.5), 6.5)
    return width + 2.2, height + 2.3


def _draw(x: Tensor, blocks: ValidityBlocks, figure: Figure, matplotlib: dict[str, Any]) -> None:
    rows, columns = blocks.shape
    if min(rows, columns) > 1:
        axes: Any = figure.subplots(2, 2, width_ratios=[5, 1], height_ratios=[1, 4], sharex="col", sharey="row")
        above, corner, picture, beside = axes.flat
        corner.set_axis_off()
        _counts(above, blocks, 0, matplotlib)
        _counts(beside, blocks, 1, matplotlib)
        drawn = [picture, beside]
    else:  # the counts of single elements would be the picture again
        picture = figure.subplots()
        drawn = [picture]
    colours = matplotlib["colors"].LinearSegmentedColormap.from_list("validity", [INVALID, VALID])
    shown = picture.imshow(
        blocks.shares, cmap=colours, vmin=0, vmax=1, aspect="auto", interpolation="nearest",
        extent=(-0.5, columns - 0.5, rows - 0.5, -0.5),
    )  # fmt: skip
    padding = blocks.padding
    if padding.any():
        blank = matplotlib["colors"].to_rgba_array([NOT_THERE]).repeat(rows_and_columns := padding.numel(), 0)
        blank[:, 3] = padding.reshape(rows_and_columns)
        picture.imshow(
            blank.reshape(*padding.shape, 4), aspect="auto", interpolation="nearest", extent=shown.get_extent()
        )
    _separate(picture, tuple(x.shape), blocks)
    _label(picture, tuple(x.shape), blocks, matplotlib)
    valid, total = int(blocks.valid.sum()), int(blocks.there.sum())
    stored = x.storage_layout if isinstance(x, MaskedTensor) else x.layout
    figure.suptitle(
        f"{tuple(x.shape)}, {str(x.dtype).removeprefix('torch.')}, stored as {stored}\n"
        f"{valid:,} of {total:,} valid ({share_of(valid, total)}){', padded' if total < x.numel() else ''}",
        fontsize="medium",
    )
    if (blocks.rows_per_block, blocks.columns_per_block) == (1, 1):
        patch = matplotlib["patches"].Patch
        others = {"invalid": INVALID, "not there": NOT_THERE} if padding.any() else {"invalid": INVALID}
        handles = [patch(color=VALID, label="valid")]
        handles += [patch(facecolor=colour, edgecolor="#aaaaaa", label=name) for name, colour in others.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    else:
        bar = figure.colorbar(shown, ax=drawn, location="bottom", fraction=0.05, aspect=40, pad=0.02)
        bar.set_label(f"valid share of blocks of {blocks.rows_per_block} × {blocks.columns_per_block}", size="small")


def _counts(axes: Axes, blocks: ValidityBlocks, dim: int, matplotlib: dict[str, Any]) -> None:
    """The valid elements of each column (`dim` 0 is summed, drawn above), or of each row (beside)."""
    along = 1 - dim
    per_block = (blocks.rows_per_block, blocks.columns_per_block)[along]
    extent, most = blocks.shape[along], blocks.shape[dim]
    starts = torch.arange(0, extent, per_block)
    edges = torch.cat([starts, torch.tensor([extent])]) - 0.5
    counts = blocks.valid.sum(dim) / edges.diff()
    axes.stairs(
        counts.numpy(), edges.numpy(), fill=True, color=COUNTS, orientation="vertical" if dim == 0 else "horizontal"
    )
    name = ("row", "column")[along]
    mean = "\n(mean of a block)" if per_block > 1 else ""
    ticks = matplotlib["ticker"].MaxNLocator(2, integer=True)
    if dim == 0:
        axes.set_ylim(0, most)
        axes.set_ylabel(f"valid per\n{name}{mean}", size="small")
        axes.yaxis.set_major_locator(ticks)
        axes.tick_params(labelbottom=False, labelsize="small")
    else:
        axes.set_xlim(0, most)
        axes.set_xlabel(f"valid per\n{name}{mean}", size="small")
        axes.xaxis.set_major_locator(ticks)
        axes.tick_params(labelleft=False, labelsize="small")
    axes.spines[["top", "right"]].set_visible(False)


def _separate(axes: Axes, shape: tuple[int, ...], blocks: ValidityBlocks) -> None:
    """Thin lines between the slices of the first dimension of those that are flattened, if they are few."""
    for sizes, draw in ((shape[: blocks.row_dims], axes.axhline), (shape[blocks.row_dims :], axes.axvline)):
        if len(sizes) > 1 and 1 < sizes[0] <= MOST_LINES:
            inner = math.prod(sizes[1:])
            for start in range(inner, inner * sizes[0], inner):
                draw(start - 0.5, color="#222222", lw=0.7)


def _label(axes: Axes, shape: tuple[int, ...], blocks: ValidityBlocks, matplotlib: dict[str, Any]) -> None:
    """Which dimensions run down and across; indices on both axes are whole numbers."""
    down, across = range(blocks.row_dims), range(blocks.row_dims, len(shape))
    for dims, axis, label in ((down, axes.yaxis, axes.set_ylabel), (across, axes.xaxis, axes.set_xlabel)):
        sizes = " · ".join(str(shape[d]) for d in dims)
        names = " · ".join(map(str, dims))
        text = f"dimension {names}" if len(dims) == 1 else f"dimensions {names}, flattened ({sizes})" if dims else ""
        label(text, size="small")
        axis.set_major_locator(matplotlib["ticker"].MaxNLocator(6, integer=True))
        extent = math.prod(shape[d] for d in dims)
        if extent == 1:
            axis.set_ticks([0] if dims else [])
    axes.tick_params(labelsize="small")
