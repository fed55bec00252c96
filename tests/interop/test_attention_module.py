"""nn.MultiheadAttention of masked tensors is one operator, which computes what torch's function does line by line."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import masked_dispatch as md
from attention_of_sequences import BATCH, HEADS, KEYS, QUERIES, WIDTH, X, noted, padding, tokens
from masked_dispatch.interop.outside_dispatch import lines_of_torch

CAUSAL = {"attn_mask": nn.Transformer.generate_square_subsequent_mask(QUERIES), "is_causal": True}
Y = tokens(KEYS, padding(KEYS, 2, 7, 4), seed=1)
SCATTERED = torch.rand(BATCH, QUERIES, WIDTH, generator=torch.Generator().manual_seed(2)) < 0.7
INPUTS: dict[str, tuple[tuple[Tensor, ...], dict[str, Any]]] = {
    "to itself": ((X,), {}),
    "to itself, elements": ((tokens(QUERIES, SCATTERED),), {}),
    "to itself, all valid": ((tokens(QUERIES, None),), {}),
    "to itself, causal": ((X,), CAUSAL),
    "to others": ((X, Y, Y), {}),
    "to others, of other values": ((X, Y, tokens(KEYS, padding(KEYS, 3, 6, 4), seed=3)), {}),
    "of plain ones to masked ones": ((X.to_tensor(0), Y, Y), {}),
    "packed, to itself": ((X.to_packed(),), {}),
    "packed, to itself, causal": ((X.to_packed(),), CAUSAL),
    "packed, to others": ((X.to_packed(), Y.to_packed()), {}),
}
Calls = tuple[Tensor, list[Tensor | None]]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return noted(monkeypatch)


def run(layer: nn.Module, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> Calls:
    """The output of a copy of the layer, and the gradients of its sum for inputs and parameters."""
    layer = copy.deepcopy(layer)
    given = [x.detach().clone().requires_grad_() for x in inputs]
    three = [given[min(n, len(given) - 1)] for n in range(3)]
    torch.manual_seed(0)
    out, _ = layer(*three, need_weights=False, **options)
    return out, list(torch.autograd.grad(out.sum(), [*given, *layer.parameters()], allow_unused=True))


def check_same(one: Calls, other: Calls) -> None:
    assert torch.equal(one[0].get_mask(), other[0].get_mask())
    md.testing.assert_close(one[0], other[0])
    for a, b in zip(one[1], other[1], strict=True):
        assert type(a) is type(b)
        if isinstance(a, md.MaskedTensor):
            assert isinstance(b, md.MaskedTensor)
            md.testing.assert_close(a, b)
            assert a.storage_layout is b.storage_layout
        elif a is not None:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("which", INPUTS)
def test_the_operator_is_what_torch_writes_line_by_line(
    which: str, dropout: float, bias: bool, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = nn.MultiheadAttention(WIDTH, HEADS, dropout=dropout, bias=bias, batch_first=True)
    found = run(layer, *INPUTS[which])
    assert ran == ["operator"]
    monkeypatch.setattr(F, "multi_head_attention_forward", lines_of_torch)
    check_same(found, run(layer, *INPUTS[which]))
    assert ran == ["operator"]


def test_evaluation_and_dropout_of_a_layer_that_is_not_trained(ran: list[str]) -> None:
    layer = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.9, batch_first=True).eval()
    x = X.detach().requires_grad_()
    out, _ = layer(x, x, x, need_weights=False)
    again, _ = layer(x, x, x, need_weights=False)
    assert ran == ["operator"] * 2
    md.testing.assert_close(out, again)


@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_a_layer_stays_packed(name: str, ran: list[str]) -> None:
    kind = nn.TransformerEncoderLayer if name == "encoder" else nn.TransformerDecoderLayer
    layer = kind(WIDTH, HEADS, 16, dropout=0.0, batch_first=True)
    operands = [X.to_packed()] if name == "encoder" else [X.to_packed(), Y.to_packed()]
    with md.densify("never"):
        out = layer(*operands)
    assert ran == ["operator"] * len(operands)
    md.testing.assert_close(out.to_layout(torch.strided), layer(*(x.to_layout(torch.strided) for x in operands)))


ELSEWHERE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "weights are asked for": ({}, {"need_weights": True}),
    "a bias for keys": ({"add_bias_kv": True}, {}),
    "attention to zeros": ({"add_zero_attn": True}, {}),
    "a padding mask": ({}, {"key_padding_mask": torch.zeros(BATCH, QUERIES, dtype=torch.bool)}),
    "an attention mask": ({}, {"attn_mask": torch.zeros(QUERIES, QUERIES, dtype=torch.bool)}),
    "weights of their own": ({"kdim": WIDTH, "vdim": WIDTH}, {}),
}


@pytest.mark.parametrize("which", ELSEWHERE)
def test_what_the_operator_does_not_compute_is_left_to_torch(which: str, ran: list[str]) -> None:
    options, arguments = ELSEWHERE[which]
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options)
    if which == "weights of their own":
        layer._qkv_same_embed_dim = False
        for name in "qkv":
            setattr(layer, f"{name}_proj_weight", nn.Parameter(torch.randn(WIDTH, WIDTH)))
    out, _ = layer(X, X, X, **{"need_weights": False, **arguments})
    assert ran == ["lines"]
    assert torch.equal(out.get_mask()[..., :1], padding(QUERIES, 5, 3, 1))


def test_one_sequence_without_a_batch_is_left_to_torch(ran: list[str]) -> None:
    layer = nn.MultiheadAttention(WIDTH, HEADS)
    assert layer(X[1], X[1], X[1], need_weights=False)[0].shape == (QUERIES, WIDTH)
    assert ran == ["lines"]


@pytest.mark.parametrize("width, heads", [(WIDTH, 3), (WIDTH + 1, HEADS)], ids=["heads", "width"])
def test_errors_are_torchs(width: int, heads: int) -> None:
    weights = [torch.randn(3 * WIDTH, WIDTH), None, None, None, False, 0.0, torch.randn(WIDTH, WIDTH), None]
    said = []
    for function in (lines_of_torch, F.multi_head_attention_forward):
        with pytest.raises((AssertionError, RuntimeError)) as error:
            function(X, X, X, width, heads, *weights, need_weights=False)
        said.append(str(error.value))
    assert said[0] == said[1]
