"""Text leaves padding blank and shows what is missing as --; pictures show the page and grey."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline as expect
from torch import Tensor

import masked_dispatch as md
from masked_dispatch.tensor.printing import INVALID, NOT_THERE, VALID, red_green_blue
from masked_dispatch.tensor.shown import validity_blocks

THERE = torch.tensor([[True, True, True, True], [True, True, False, False]])
MISSING = torch.tensor([[True, False, True, True], [True, True, True, True]])


def batch(hidden: float = torch.nan) -> md.MaskedTensor:
    data = torch.where(THERE & MISSING, torch.arange(8.0).view(2, 4), hidden)
    return md.padded(md.masked_tensor(data, THERE & MISSING), THERE)


def test_text() -> None:
    whole = md.padded(md.masked_tensor(torch.arange(8.0).view(2, 4), THERE))
    texts = [whole, batch(), batch().flip(1), whole.int(), whole.to(torch.complex64), whole[:1], whole > 2, whole * 0]
    expect(
        "\n".join(map(str, texts)),
        """\
masked_tensor([[0., 1., 2., 3.],
               [4., 5.,   ,   ]], valid=6/6, padded to (2, 4), True=valid)
masked_tensor([[0., --, 2., 3.],
               [4., 5.,   ,   ]], valid=5/6, padded to (2, 4), True=valid)
masked_tensor([[3., 2., --, 0.],
               [5., 4.,   ,   ]], valid=5/6, padded to (2, 4), True=valid)
masked_tensor([[0, 1, 2, 3],
               [4, 5,  ,  ]], valid=6/6, padded to (2, 4), True=valid,
              dtype=torch.int32)
masked_tensor([[0.+0.j, 1.+0.j, 2.+0.j, 3.+0.j],
               [4.+0.j, 5.+0.j,       ,       ]], valid=6/6, padded to (2, 4),
              True=valid)
masked_tensor([[0., 1., 2., 3.]], valid=4/4, True=valid)
masked_tensor([[False, False, False,  True],
               [ True,  True,      ,      ]], valid=6/6, padded to (2, 4),
              True=valid)
masked_tensor([[0., 0., 0., 0.],
               [0., 0.,   ,   ]], valid=6/6, padded to (2, 4), True=valid)""",
    )


@pytest.mark.parametrize(
    "store", [lambda x: x.to_packed(), *(lambda x, n=n: getattr(x, f"to_sparse_{n}")() for n in ("coo", "csr", "csc"))]
)
def test_text_in_other_storages(store: Callable[[md.MaskedTensor], md.MaskedTensor]) -> None:
    """Values, blanks and counts are as in dense storage, before what is said of the storage."""
    for x in (batch(), batch().flip(1), batch() * 0, md.from_lengths(torch.ones(100, 50), torch.arange(100) % 50)):
        dense = re.sub(r"\s+", " ", str(x)).removesuffix(")").replace(", stored as torch.strided", "")
        stored = re.sub(r"\s+", " ", str(store(x)))
        assert stored.startswith(f"{dense}, stored as torch."), stored
    assert store(batch())._repr_html_().count("5/6") == 1


def test_a_summary() -> None:
    x = md.from_lengths(torch.ones(100, 50), torch.arange(100) % 50)
    expect(
        str(x.mask_with(torch.arange(50) != 1)),
        """\
masked_tensor([[  ,   ,   ,  ...,   ,   ,   ],
               [1.,   ,   ,  ...,   ,   ,   ],
               [1., --,   ,  ...,   ,   ,   ],
               ...,
               [1., --, 1.,  ...,   ,   ,   ],
               [1., --, 1.,  ..., 1.,   ,   ],
               [1., --, 1.,  ..., 1., 1.,   ]], size=(100, 50),
              valid=2354/2450 (96.1%), padded, True=valid,
              stored as torch.strided)""",
    )


def test_elements_of_a_batch_that_is_nearly_all_padding_are_listed() -> None:
    x = md.from_lengths(torch.ones(100, 50), (torch.arange(100) == 50) * 20)
    text = str(x.mask_with(torch.arange(50) != 1))
    assert text.startswith("masked_tensor({(50,  0): 1.,\n               (50,  2): 1.,")
    assert "valid=19/20 (95.0%), padded,\n" in text


def test_two_dimensions_of_positions() -> None:
    x = md.from_lengths(torch.ones(2, 3), torch.tensor([3, 1]))
    assert str(x[:, :, None] * x[:, None]).endswith(
        "[[1.,   ,   ],\n                [  ,   ,   ],\n                [  ,   ,   ]]], valid=10/10, "
        "padded to (2, 3, 3), True=valid)"
    )


def test_nothing_under_the_mask_is_shown() -> None:
    assert len({f"{batch(hidden)}{batch(hidden)._repr_html_()}" for hidden in (0.0, torch.nan, 1e38)}) == 1


def test_what_has_no_values_prints() -> None:
    assert "..." in repr(batch().to("meta"))


# ------------------------------------------------------------------------------------------------------------- pictures


def pixels(page: str) -> Tensor:
    (encoded,) = re.findall(r'src="data:image/png;base64,([^"]*)"', page)
    import matplotlib.image  # takes a second, in any process that collects

    image = matplotlib.image.imread(io.BytesIO(base64.b64decode(encoded)), format="png")
    return (torch.from_numpy(image.copy()) * 255).round().to(torch.int64)


def over_white(image: Tensor) -> Tensor:
    opacity = image[..., 3:] / 255
    return (image[..., :3] * opacity + 255 * (1 - opacity)).round().to(torch.int64)


def test_a_notebook_shows_the_page_where_nothing_is_there() -> None:
    page = batch()._repr_html_()
    assert "2 × 4, float32: 5 of 6 valid (83.3%), padded</div>" in page
    assert "background:none;" in page
    v, i, n = map(list, map(red_green_blue, (VALID, INVALID, NOT_THERE)))
    assert over_white(pixels(page)).tolist() == [[v, i, v, v], [v, v, n, n]]
    assert pixels(page)[1, 2:, 3].tolist() == [0, 0]  # on dark pages too


def test_blocks_count_what_is_there() -> None:
    x = md.from_lengths(torch.ones(9, 11, 3), torch.arange(9)).mask_with(torch.arange(3) != 1)
    blocks = validity_blocks(x._printed_record, 4, 3, 1)
    there, valid = (t.reshape(9, 33) for t in (x.extent, x.get_mask()))
    for down in range(3):
        for across in range(3):
            part = slice(3 * down, 3 * down + 3), slice(11 * across, 11 * across + 11)
            n = int(there[part].sum())
            assert int(blocks.there[down, across]) == n
            assert float(blocks.shares[down, across]) == pytest.approx(int(valid[part].sum()) / max(n, 1))
            assert float(blocks.padding[down, across]) == pytest.approx(1 - n / there[part].numel())


def test_a_plot_leaves_it_blank() -> None:
    import matplotlib

    matplotlib.use("agg")
    figure = md.plot.mask(batch())
    assert "5 of 6 valid (83.3%), padded" in figure.get_suptitle()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["valid", "invalid", "not there"]
    shares, blank = [image.get_array() for axes in figure.axes for image in axes.get_images()]
    assert shares.tolist() == [[1, 0, 1, 1], [1, 1, 0, 0]]
    assert blank[..., 3].tolist() == [[0, 0, 0, 0], [0, 0, 1, 1]]
    figure.canvas.draw()
    without: Any = md.plot.mask(batch().without_extent())
    assert [text.get_text() for text in without.legends[0].get_texts()] == ["valid", "invalid"]
    assert sum(len(axes.get_images()) for axes in without.axes) == 1
    matplotlib.pyplot.close("all")
