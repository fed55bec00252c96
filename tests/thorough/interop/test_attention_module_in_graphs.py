"""nn.MultiheadAttention compiled, exported, traced and scripted: plain as torch's, masked as in eager code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import masked_dispatch as md
from attention_of_sequences import BATCH, HEADS, QUERIES, WIDTH, X, noted


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return noted(monkeypatch)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_torch_compiles_traces_and_scripts_its_own_function() -> None:
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    q = torch.randn(BATCH, QUERIES, WIDTH)
    expected = layer(q, q, q)[0]
    ways: dict[str, Callable[..., Any]] = {
        "script": torch.jit.script(layer),
        "trace": torch.jit.trace(layer, (q, q, q)),
        "compile": torch.compile(layer, fullgraph=True, backend="aot_eager"),
        "export": torch.export.export(layer, (q, q, q)).module(),
    }
    for name, way in ways.items():
        torch.testing.assert_close(way(q, q, q)[0], expected, msg=lambda said, name=name: f"{name}: {said}")


def test_compiled_as_in_eager(ran: list[str]) -> None:
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    compiled = torch.compile(lambda x: layer(x, x, x, need_weights=False)[0], fullgraph=True, backend="aot_eager")
    found = compiled(X)
    assert set(ran) == {"operator"}
    md.testing.assert_close(found, layer(X, X, X, need_weights=False)[0])
    assert ran[-1] == "operator"
