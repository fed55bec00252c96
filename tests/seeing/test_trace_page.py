"""The page of a trace: a whole page that needs nothing else, which a browser shows (test_trace_page_in_browser.py)."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

import masked_dispatch as md
from page_of_a_trace import written_in

VOID = {"meta", "input"}


class Page(HTMLParser):
    """The elements of a page: each with its tag, its attributes, its text and what is in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.errors: list[str] = []
        self.deepest = 0
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
            self.deepest = max(self.deepest, self.open.count("details"))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.errors.append(f"</{tag}> closes nothing")

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text.append(data)

    def classes(self, name: str) -> int:
        return sum(name in (attributes.get("class") or "").split() for _, attributes in self.elements)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return written_in(tmp_path)


def test_the_page_is_well_formed_and_complete(written: Path) -> None:
    page = Page(written.read_text(encoding="utf-8"))
    assert page.errors == []
    assert page.open == []
    assert page.deepest == 3
    text = "".join(page.text)
    for words in ("Model", "first.0 (Linear)", "aten.mean.default", "lost", "grown", "backward", "stored densely"):
        assert words in text
    assert page.classes("raised") == 4  # two rows, each with its mark
    assert "MaskedSemanticsError: torch.linalg.ldl_factor (linalg_ldl_factor_ex) has no meaning" in text
    assert page.classes("lost") >= 2
    assert next(a["style"] for tag, a in page.elements if tag == "i") == "width:50.0%"


def test_the_page_needs_nothing_else(written: Path) -> None:
    text = written.read_text(encoding="utf-8")
    page = Page(text)
    assert [tag for tag, _ in page.elements if tag in {"script", "link", "img", "iframe"}] == []
    assert [a for _, a in page.elements if {"src", "href"} & set(a)] == []
    assert "url(" not in text
    assert "@import" not in text
    assert "http" not in text


def test_what_is_named_by_users_is_escaped(tmp_path: Path) -> None:
    class Angle(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("<b>&")

    with md.trace() as t, pytest.raises(ValueError, match="<b>"):
        nn.Sequential(type("<i>", (nn.Identity,), {})(), Angle())(md.masked_tensor(torch.ones(1), None))
    t.to_html(tmp_path / "trace.html")
    page = Page((tmp_path / "trace.html").read_text(encoding="utf-8"))
    assert page.errors == []
    assert "0 (<i>)" in page.text


def test_an_empty_trace(tmp_path: Path) -> None:
    with md.trace() as t:
        pass
    t.to_html(tmp_path / "trace.html")
    assert "Nothing was called with a masked tensor." in Page((tmp_path / "trace.html").read_text()).text
