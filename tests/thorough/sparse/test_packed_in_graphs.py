"""Packed batches in compiled graphs: they stay packed, for batches of any lengths in one graph (P4, P7)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import masked_dispatch as md
from op_registry.ops.attention import in_graphs

B, T, H, D = 4, 6, 2, 4
LENGTHS = (torch.tensor([6, 1, 0, 3]), torch.tensor([2, 0, 5, 5]))
ATTENTION = torch.ops.masked_rows.attention.default


def rows(lengths: Tensor, features: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    data = torch.randn(len(lengths), T, features, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return md.from_lengths(data.to(dtype), lengths).to_packed().requires_grad_()


def heads(x: Tensor, count: int = H) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def attend_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(heads(q), heads(k), heads(v), scale=0.3).transpose(1, 2).flatten(2)


def attend_causally(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    attended = F.scaled_dot_product_attention(heads(q), heads(q * k), heads(q + v), is_causal=True)
    return attended.transpose(1, 2).flatten(2)


def attend_without_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def attend_in_groups(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = heads(torch.cat([q, 2 * q], -1), 2 * H)
    return F.scaled_dot_product_attention(q, heads(k), heads(v), enable_gqa=True).transpose(1, 2).flatten(2)


# Without heads, and in groups, torch chooses another kernel outside of graphs, which rounds elsewhere.
TOLERANCES = {torch.bfloat16: {"rtol": 0.02, "atol": 0.02}}

FUNCTIONS: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = [
    attend_heads,
    attend_causally,
    attend_without_heads,
    attend_in_groups,
]


def loss_and_gradients(attend: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
    result = attend(x, y)
    gradients = torch.autograd.grad(result.square().sum(), [x, y], allow_unused=True)
    assert result.storage_layout is torch.jagged
    return [result, *(g for g in gradients if g is not None)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_attention_in_a_graph_equals_attention_without(function, dtype):
    def attend(x: Tensor, y: Tensor) -> Tensor:
        # Causal attention is between elements of one batch: those of another have other positions.
        other = x if function is attend_causally else y
        return function(x, other * 2, other.sin())

    torch.compiler.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    with md.densify("never"):
        for lengths in LENGTHS:
            x, y = rows(lengths, D * H, 1, dtype), rows(lengths.flip(0), D * H, 2, dtype)
            expected = loss_and_gradients(attend, x, y)
            found = loss_and_gradients(compiled, x, y)
            for a, b in zip(found, expected, strict=True):
                md.testing.assert_close(a, b, **TOLERANCES.get(dtype, {}))


def test_the_operator_and_its_gradient_are_sound():
    bounds = torch.tensor([0, 3, 3, 5]), torch.tensor([0, 2, 4, 4])
    data = [torch.randn(n, H, D, dtype=torch.float64, requires_grad=True) for n in (5, 4, 4)]
    torch.library.opcheck(ATTENTION, (*data, *bounds, False, None))
    torch.autograd.gradcheck(lambda *x: ATTENTION(*x, *bounds, False, 0.3)[0], data)


def compiled_and_eager(model: nn.Module, lengths: Tensor, compiled: Callable[[Tensor], Tensor]) -> None:
    """Assert that loss and gradients of all parameters are the same, without a tensor of every position."""
    results = []
    for run in (model, compiled):
        model.zero_grad()
        batch = rows(lengths, D * H, 7)
        with md.densify("never"):
            loss = run(batch).square().mean()
            loss.backward()
        results.append([loss.detach().to_tensor(0), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(results[1], results[0])


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D * H, H, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).double()


@pytest.mark.parametrize(("dynamic", "more"), [(True, 0), (None, 1)])
def test_a_stock_encoder_stays_packed_in_one_graph_for_batches_of_any_size(dynamic, more):
    model = encoder()
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=dynamic)
    compiled_and_eager(model, LENGTHS[0], compiled)
    compilations = counter.frame_count
    for lengths in (LENGTHS[1], torch.tensor([3, 6]), torch.tensor([1, 4, 4, 2, 6])):
        compiled_and_eager(model, lengths, compiled)
    assert counter.frame_count - compilations == more


def test_what_the_operator_does_not_serve_is_stored_densely():
    def attend(x: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, mask)

    torch.compiler.reset()
    x, mask = rows(LENGTHS[0], D, 1), torch.ones(T, T, dtype=torch.bool)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    with md.densify("always"):
        md.testing.assert_close(compiled(x, mask), attend(x, mask).to_dense())
    torch.compiler.reset()
    with md.densify("never"), pytest.raises(md.MaskedSemanticsError, match="in a graph, attention of sequences"):
        compiled(x, mask)


def test_no_exported_program_gets_an_operator_of_this_library(monkeypatch):
    x = torch.randn(3, H, D)
    assert in_graphs.serves(x, x, x)
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    assert not in_graphs.serves(x, x, x)
