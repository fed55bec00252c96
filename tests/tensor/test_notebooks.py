"""_repr_html_: a self-contained part of a page, of bounded size, whose picture is the mask and nothing else; colours.

What is invalid has one colour in everything that the library and its pages draw.
"""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline as expect

import masked_dispatch as md
from masked_dispatch.tensor.printing import INVALID, INVALID_OVER_ANY_PAGE, VALID, red_green_blue
from masked_dispatch.tensor.shown import squarest, validity_blocks
from repository import ROOT
from storages import LAYOUTS

STORAGES = [torch.strided, *LAYOUTS, torch.jagged]


def stored(x: md.MaskedTensor, layout: torch.layout) -> md.MaskedTensor:
    return x.to_layout(layout, blocksize=(2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None)


def holey(hidden: float, *shape: int) -> md.MaskedTensor:
    data = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    mask = data % 3 != 0
    return md.masked_tensor(torch.where(mask, data, hidden), mask)


class Tags(HTMLParser):
    """Which tags are open, and the attributes of every tag."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag != "img":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def pixels(page: str) -> torch.Tensor:
    """The opacity of each pixel of the page's picture, 0 to 255."""
    (encoded,) = re.findall(r'src="data:image/png;base64,([^"]*)"', page)
    import matplotlib.image  # takes a second, in any process that collects

    image = matplotlib.image.imread(io.BytesIO(base64.b64decode(encoded)), format="png")
    return (torch.from_numpy(image.copy())[..., 3] * 255).round().to(torch.int64)


@pytest.mark.parametrize("layout", STORAGES, ids=str)
def test_the_picture_is_the_mask(layout: torch.layout) -> None:
    x = stored(holey(0.0, 4, 6), layout)
    assert torch.equal(pixels(x._repr_html_()), x.get_mask() * 255)


def test_what_a_page_holds() -> None:
    page = holey(0.0, 2, 3)._repr_html_()
    expect(
        re.sub(r"base64,[^\"]*", "base64,…", page),
        """\
<div><div style="margin:4px 0">2 × 3, float32: 4 of 6 valid (66.7%)</div><img alt="validity of 2 × 3, float32: 4 of 6 valid (66.7%)" width="48" height="32" style="image-rendering:pixelated;background:rgba(128,128,128,.25);outline:1px solid rgba(128,128,128,.6)" src="data:image/png;base64,…"><pre style="margin:4px 0;line-height:1.25">masked_tensor([[--, 1., 2.],
               [--, 4., 5.]], valid=4/6, True=valid)</pre></div>""",  # noqa: E501
    )


@pytest.mark.parametrize("layout", STORAGES, ids=str)
def test_pages_are_whole_and_need_nothing_else(layout: torch.layout) -> None:
    x = stored(holey(0.0, 4, 6).requires_grad_(), layout) * 2
    page = x._repr_html_()
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert html.escape(repr(x)) in page  # grad_fn=<…> among it
    assert not re.search(r"https?:|<script|url\(", page)
    assert {name for name, _ in tags.attributes} == {"style", "alt", "width", "height", "src"}


@pytest.mark.parametrize("layout", STORAGES, ids=str)
def test_nothing_under_the_mask_is_on_the_page(layout: torch.layout) -> None:
    pages = {stored(holey(hidden, 4, 6), layout)._repr_html_() for hidden in (0.0, float("nan"), 1e38, -7.5)}
    assert len(pages) == 1


@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_coo, torch.sparse_csr], ids=str)
def test_large_tensors_are_shown_by_shares_in_a_bounded_size(layout: torch.layout) -> None:
    mask = torch.arange(1000)[:, None] >= torch.arange(1000)  # the lower triangle
    page = md.masked_tensor(torch.rand(1000, 1000), mask).to_layout(layout)._repr_html_()
    shown = pixels(page)
    assert shown.shape == (63, 91)
    assert "a pixel is 16 × 11 elements" in page
    assert shown[-1, 0] == 255
    assert shown[0, -1] == 0
    assert 0 < shown[31, 45] < 255
    assert len(page) < 20_000


def test_the_largest_page_is_bounded() -> None:
    noise = torch.rand(640, 960) < torch.rand(640, 960)
    assert len(md.masked_tensor(torch.rand(640, 960), noise)._repr_html_()) < 20_000


@pytest.mark.parametrize("shape", [(), (5,), (0, 3), (3, 0), (2, 3, 4), (70, 1, 3), (2, 200)], ids=str)
def test_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    x = holey(0.0, *shape)
    page = x._repr_html_()
    if x.numel():
        shares = pixels(page) / 255
        valid = validity_blocks(x._printed_record, 64, 96)
        assert int(valid.valid.sum()) == int(x.count())
        assert int(valid.elements.sum()) == x.numel()
        torch.testing.assert_close(shares.double(), valid.shares, atol=1 / 255, rtol=0)
    else:
        assert "<img" not in page


def of_lengths() -> md.MaskedTensor:
    return md.from_lengths(torch.rand(5, 7, 4), torch.tensor([7, 1, 0, 3, 5]))


SHOWN: dict[str, Callable[[], md.MaskedTensor]] = {
    "lengths": of_lengths,
    "packed": lambda: of_lengths().to_packed(),
    "packed, time first": lambda: of_lengths().to_packed().transpose(0, 1),
    "hybrid": lambda: of_lengths().to_sparse(sparse_dim=2),
    "rows": lambda: md.masked_tensor(torch.rand(9, 11), torch.rand(9, 1) > 0.5),
    "blocks": lambda: md.masked_tensor(torch.rand(9, 11), torch.rand(9, 11) > 0.5).to_sparse_bsr((3, 11)),
    "all valid": lambda: md.masked_tensor(torch.rand(9, 11)).T,
}


# Each tensor by blocks and element by element or as a whole; "all": every dimension runs down.
@pytest.mark.parametrize(
    "name, row_dims, most_rows, most_columns",
    [
        ("lengths", None, 4, 3),
        ("lengths", "all", 100, 100),
        ("packed", 1, 4, 3),
        ("packed", None, 100, 100),
        ("packed, time first", 1, 4, 3),
        ("packed, time first", "all", 1, 1),
        ("hybrid", 0, 4, 3),
        ("hybrid", 1, 100, 100),
        ("rows", None, 4, 3),
        ("rows", 0, 1, 1),
        ("blocks", "all", 4, 3),
        ("blocks", 1, 1, 1),
        ("all valid", None, 4, 3),
        ("all valid", 0, 100, 100),
    ],
)
def test_blocks_count_what_is_valid(name: str, row_dims: int | str | None, most_rows: int, most_columns: int) -> None:
    x = SHOWN[name]()
    row_dims = x.ndim if row_dims == "all" else row_dims
    blocks = validity_blocks(x._printed_record, most_rows, most_columns, row_dims)
    mask = x.get_mask().reshape(blocks.shape)
    for down in range(blocks.valid.shape[0]):
        for across in range(blocks.valid.shape[1]):
            rows = slice(down * blocks.rows_per_block, (down + 1) * blocks.rows_per_block)
            columns = slice(across * blocks.columns_per_block, (across + 1) * blocks.columns_per_block)
            assert int(blocks.valid[down, across]) == int(mask[rows, columns].sum())
            assert int(blocks.elements[down, across]) == mask[rows, columns].numel()


def test_which_dimensions_run_down() -> None:
    splits = {(): 0, (5,): 0, (2, 99): 1, (99, 2): 1, (6, 9, 4): 1, (32, 128, 768): 2, (3, 32, 32): 2, (8, 3, 9, 9): 2}
    assert {shape: squarest(torch.Size(shape)) for shape in splits} == splits
    assert "valid (66.7%); 6 down, 9 · 4 across</div>" in holey(0.0, 6, 9, 4)._repr_html_()


def test_what_has_no_memory_has_a_picture_too() -> None:
    """10¹² elements that no machine could copy, and 10¹⁵ of which two are stored."""
    rows = torch.arange(10**6)[:, None] % 2 == 0
    wide = md.as_masked_tensor(torch.zeros(()).expand(10**6, 10**6), rows)
    assert set(pixels(wide._repr_html_()).unique().tolist()) == {127, 128}
    indices = torch.tensor([[0, 2**20 - 1], [1, 2**30 - 1]])
    sparse = torch.sparse_coo_tensor(indices, torch.ones(2), (2**20, 2**30), is_coalesced=True, check_invariants=True)
    assert "2 of 1,125,899,906,842,624 valid (&lt;0.1%)" in md.as_masked_tensor(sparse)._repr_html_()


def test_where_there_are_no_values_to_look_at() -> None:
    x = md.as_masked_tensor(torch.empty(2, 3, device="meta"))
    assert x._repr_html_() == f'<div><pre style="margin:4px 0;line-height:1.25">{html.escape(repr(x))}</pre></div>'


# ------------------------------------------------------------------------------------------------------------ colours


def test_over_white_the_transparent_grey_is_the_opaque_one() -> None:
    grey, alpha = re.fullmatch(r"rgba\((\d+),\1,\1,(.*)\)", INVALID_OVER_ANY_PAGE).groups()  # type: ignore[union-attr]
    over_white = int(grey) * float(alpha) + 255 * (1 - float(alpha))
    assert red_green_blue(INVALID) == (round(over_white),) * 3


def test_notebooks_and_traces_have_it(tmp_path: Path) -> None:
    x = holey(0.0, 3)
    assert f"background:{INVALID_OVER_ANY_PAGE};" in x._repr_html_()
    with md.trace() as trace:
        x.sum()
    trace.to_html(tmp_path / "trace.html")
    page = (tmp_path / "trace.html").read_text(encoding="utf-8")
    assert f"--valid: {VALID}; --invalid: {INVALID_OVER_ANY_PAGE};" in page


def test_cells_of_the_pages_pictures_have_it() -> None:
    drawn = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs/pictures").glob("*.svg"))
    assert f'fill="{INVALID}"' in drawn
    assert "dasharray" not in drawn


def test_nobody_draws_it_in_another() -> None:
    """Colours by the name of invalid, bad or missing values are the constant's."""
    others = {
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for folder in ("masked_dispatch", "examples", "benchmarks", "docs/extensions")
        for path in Path(ROOT / folder).rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"(?i)\b(invalid|bad|missing|hidden)\w*[\"']?\s*[=:]\s*[\"'](#|rgb)", line)
        and path.name != "printing.py"
    }
    assert not others
