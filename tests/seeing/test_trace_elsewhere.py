"""Traces of compiled functions, of backward, of checkpoints, of what is stored densely and of stock models."""

from __future__ import annotations

import subprocess
import sys
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
from op_registry.sparse.record import on_dense

aten = torch.ops.aten
MASK = torch.tensor([[True, True, False], [True, False, False]])


def some(requires_grad: bool = False) -> md.MaskedTensor:
    return md.masked_tensor(torch.arange(1.0, 7.0).reshape(2, 3), MASK, requires_grad=requires_grad)


def names(calls: Any) -> list[str]:
    return [call.name for call in calls]


# ----------------------------------------------------------------------------------------------------------- compiled


def doubled_sum(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).sum(0)


def test_a_compiled_function_runs_uncompiled_and_is_compiled_again_afterwards() -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(doubled_sum, backend=backend, fullgraph=True)
    expected = compiled(some())
    with md.trace() as t:
        found = compiled(some())
    assert torch.equal(found, expected)
    assert torch.equal(compiled(some()), expected)
    assert len(graphs) == 1
    assert names(t.calls) == ["aten.mul.Tensor", "aten.sum.dim_IntList"]
    assert "(what torch.compile returned ran uncompiled, so that its calls are seen)" in str(t)


FIRST_COMPILED_INSIDE = """
import sys, torch, masked_dispatch as md
assert "torch._dynamo" not in sys.modules
x = md.from_lengths(torch.ones(2, 3), torch.tensor([3, 1]))
layer = torch.nn.Linear(3, 2)
with md.trace() as t:
    compiled = torch.compile(lambda x: layer(x * 2), backend="aot_eager", fullgraph=True)
    compiled(x)
    compiled(x)
print([call.name for call in t.calls])
"""


@pytest.mark.slow  # a process that loads the compiler
def test_what_is_compiled_for_the_first_time_inside_a_trace() -> None:
    """The first run goes into a graph, and says so; the next run is seen."""
    done = subprocess.run([sys.executable, "-c", FIRST_COMPILED_INSIDE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == str(
        [
            "compiled region: its calls go into a graph and are not seen; run it again, or uncompiled, to see inside",
            "aten.mul.Tensor",
            "Linear",
            "aten.linear.default",
        ]
    )


def test_a_compiled_module_is_shown_once() -> None:
    model = torch.compile(nn.Sequential(nn.Linear(3, 2)), backend="eager")
    with md.trace() as t:
        model(some())
    assert [(call.name, call.depth) for call in t.calls] == [
        ("Sequential", 0),
        ("0 (Linear)", 1),
        ("aten.linear.default", 2),
    ]


def test_an_exported_program_is_a_compiled_region() -> None:
    class Exported(nn.Module):
        def forward(self, data: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return md.as_masked_tensor(data, mask).exp().to_tensor(0)

    with md.trace() as t:
        torch.export.export(Exported(), (torch.ones(2, 3), MASK))
    assert [call.kind for call in t.calls] == ["compiled region"]


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
        found = model(words)
    assert t.calls[0].name == "BertModel"
    assert {"encoder.layer.1 (BertLayer)", "encoder.layer.0.attention (BertAttention)"} <= set(names(t.calls))
    assert t.lost() == ()
    assert "aten.embedding.default" in names(t.of(found.last_hidden_state).calls)
