"""What is invalid has one colour in everything that the library and its pages draw."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import masked_dispatch as md
from masked_dispatch.tensor.printing import INVALID, INVALID_OVER_ANY_PAGE, VALID, red_green_blue
from repository import ROOT

X = md.masked_tensor(torch.ones(3), torch.tensor([True, False, True]))


def test_over_white_the_transparent_grey_is_the_opaque_one() -> None:
    grey, alpha = re.fullmatch(r"rgba\((\d+),\1,\1,(.*)\)", INVALID_OVER_ANY_PAGE).groups()  # type: ignore[union-attr]
    over_white = int(grey) * float(alpha) + 255 * (1 - float(alpha))
    assert red_green_blue(INVALID) == (round(over_white),) * 3


def test_notebooks_and_traces_have_it(tmp_path: Path) -> None:
    assert f"background:{INVALID_OVER_ANY_PAGE};" in X._repr_html_()
    with md.trace() as trace:
        X.sum()
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
