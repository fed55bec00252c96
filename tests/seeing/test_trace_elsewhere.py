"""Traces of backward, of checkpoints, of what is stored densely and of stock models; and their pages."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import masked_dispatch as md
from masked_dispatch.densification import on_densify
from op_registry import registry
from op_registry.authoring import Dense, Sparse, to_dense
from op_registry.registry import Overlay
from op_registry.sparse.convert import on_dense
from traced_tensors import names, some, written_in

aten = torch.ops.aten


# ---------------------------------------------------------------------------------------------------------- backward


def test_backward_says_which_call_a_gradient_belongs_to() -> None:
    x = some(requires_grad=True)
    with md.trace() as t:
        y = x.exp()
    with md.trace() as t:
        y.sin().sum().backward()
    backward = [call for call in t.calls if call.backward]
    assert {call.depth for call in backward} == {0}
    assert [call.name for call in backward][:6] == [
        "gradient of the result of aten.sum.default, call 1",
        "gradient of an operand of aten.sum.default, call 1",
        "gradient of the result of aten.sin.default, call 0",
        "gradient of an operand of aten.sin.default, call 0",
        "gradient of the result of a call before the trace",
        "gradient of an operand of a call before the trace",
    ]
    assert [str(call.results[0]) for call in backward if "an operand" in call.name] == ["3/6 50%"] * 3


def test_backward_of_sparse_storage() -> None:
    x = some().to_sparse_csr().requires_grad_()
    with md.trace() as t:
        x.exp().sum().backward()
    gradient = next(c for c in t.calls if c.name == "gradient of an operand of aten.exp.default, call 0")
    assert gradient.results[0].storage == "csr"


def test_a_sum_of_gradients_and_a_checkpoint_are_backward_calls() -> None:
    x, module = some(requires_grad=True), nn.Sequential(nn.Tanh())
    with md.trace() as t:
        (checkpoint(module, x, use_reentrant=False) + x).sum().backward()
    again = [(call.name, call.backward) for call in t.calls if "tanh" in call.name and "gradient" not in call.name]
    assert again == [("aten.tanh.default", False), ("aten.tanh.default", True)]
    assert ("aten.add.Tensor", True) in [(call.name, call.backward) for call in t.calls]
    assert [call.backward for call in t.calls if call.name == "Sequential"] == [False, True]


# ------------------------------------------------------------------------------------------------ stored densely


def test_what_is_stored_densely_is_seen_with_its_operator() -> None:
    x, listeners = some().to_sparse(), len(on_densify)
    with md.trace() as t:
        torch.fft.fft(x)
        x.exp()
        x.get_mask()
        x.to_dense()
        x.to_tensor(0)
    assert names(t.densified()) == [
        "aten._fft_r2c.default" if "aten._fft_r2c.default" in names(t.calls) else "aten.fft_fft.default",
        "masked_dispatch.get_mask.default",
        "masked_dispatch.to_layout.default",
        "masked_dispatch.to_tensor.Scalar",
    ]
    whys = [call.densified[0].why for call in t.densified()]
    assert whys[1:] == ["it gives a plain tensor of every element, stored or not", *["the call asks for it"] * 2]
    assert (len(on_densify), len(on_dense)) == (listeners, 0)


def test_what_is_stored_densely_without_asking_is_seen_too() -> None:
    """A lowering that stores its operand densely by itself."""
    overlay = Overlay(registry)
    rule = overlay.replace(aten.exp.default, exponential)
    rule.lowering(Sparse)(densely)
    x = some().to_sparse()
    with registry.overlay(overlay), md.trace() as t, md.densify("never"):
        x.exp()
    (call,) = t.densified()
    assert call.name == "aten.exp.default"
    assert str(call.densified[0]) == (
        "aten.exp.default stores shape (2, 3) as torch.sparse_coo with 3 stored densely, 30 bytes: without asking the "
        "policy"
    )


def exponential(x: Dense) -> Dense:
    return x.like(x.data.exp())


def densely(op: Any, x: Sparse) -> Dense:
    return exponential(to_dense(x))


# -------------------------------------------------------------------------------------------------------- stock models


def test_the_modules_of_a_transformer() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False)
    batch = md.from_lengths(torch.randn(3, 5, 8), torch.tensor([5, 2, 3]))
    with md.trace() as t:
        model(batch)
        model(batch.to_packed())
    modules = [call for call in t.calls if call.kind == "module"]
    assert {"layers.0 (TransformerEncoderLayer)", "layers.1.self_attn (MultiheadAttention)"} <= set(names(modules))
    assert {call.storage for call in modules if call.name == "TransformerEncoder"} == {"dense", "packed"}
    assert {(call.operands[0].valid, call.results[0].valid) for call in modules[:1]} == {(80, 80)}


def test_bert() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
    )
    model = transformers.BertModel(config).eval()
    words = md.from_lengths(torch.arange(15).reshape(3, 5), torch.tensor([5, 2, 3]))
    with md.trace() as t:
        output = model(words)
    assert t.calls[0].name == "BertModel"
    assert {"encoder.layer.1 (BertLayer)", "encoder.layer.0.attention (BertAttention)"} <= set(names(t.calls))
    assert t.lost() == ()
    assert "aten.embedding.default" in names(t.of(output.last_hidden_state).calls)


# ---------------------------------------- the page of a trace, which needs nothing else (test_trace_page_in_browser.py)

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


def test_the_page_is_well_formed_and_complete(tmp_path: Path) -> None:
    page = Page(written_in(tmp_path).read_text(encoding="utf-8"))
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


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    text = written_in(tmp_path).read_text(encoding="utf-8")
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
