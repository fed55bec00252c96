"""Stock models on packed batches stay packed from input to loss, with the values and gradients of the padded batch.

Both run in float64; under ``densify("never")`` an operator that leaves packed storage raises.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import masked_dispatch as md
from packed_batches import KINDS, B, batch

WIDTH, HEADS, STEPS, WORDS = 8, 2, 6, 11
close = partial(md.testing.assert_close, rtol=1e-10, atol=1e-10)

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")

# A function of a module, a source and a target, which some ignore.
Call = Callable[[nn.Module, Tensor, Tensor], Any]


def encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 12, dropout=0.0, **options)
    return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)


def decoder(**options: Any) -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, HEADS, 12, dropout=0.0, **options), 2)


def transformer(**options: Any) -> nn.Module:
    return nn.Transformer(WIDTH, HEADS, 1, 1, 12, dropout=0.0, **options)


def attention(**options: Any) -> nn.Module:
    return nn.MultiheadAttention(WIDTH, HEADS, **options)


def time_first(call: Call) -> Call:
    """The call on sequences whose first dimension is time."""
    return lambda module, source, target: call(module, source.transpose(0, 1), target.transpose(0, 1))


def encode(module: nn.Module, source: Tensor, target: Tensor, **arguments: Any) -> Tensor:
    return module(source, **arguments)


def decode(module: nn.Module, source: Tensor, target: Tensor, **arguments: Any) -> Tensor:
    return module(target, source, **arguments)


def translate(module: nn.Module, source: Tensor, target: Tensor, **arguments: Any) -> Tensor:
    return module(source, target, **arguments)


def attend(module: nn.Module, source: Tensor, target: Tensor) -> Tensor:
    return module(source, source, source, need_weights=False)[0]


def attend_to_other(module: nn.Module, source: Tensor, target: Tensor) -> Tensor:
    return module(source, target, target, need_weights=False)[0]


def recur(module: nn.Module, source: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    """Its last states are results, too."""
    out, state = module(source)
    return (out, *state) if isinstance(state, tuple) else (out, state)


def pooled(pool: Callable[[Tensor], Tensor]) -> tuple[Callable[[], nn.Module], Call]:
    """Pooling over time, then a linear layer."""
    return (
        lambda: nn.Sequential(encoder(batch_first=True), nn.Linear(WIDTH, 3)),
        lambda module, source, target: module[1](pool(module[0](source))),
    )


def embedded(module: nn.Module, source: Tensor, target: Tensor, with_batch: bool) -> Tensor:
    """Sums with embeddings of positions."""
    words, positions, layers = module
    indices = (source[..., 0] * 100).long().abs() % WORDS
    return layers(words(indices) + (positions.weight[None] if with_batch else positions.weight) + source)


def with_embeddings() -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Embedding(STEPS, WIDTH), encoder(batch_first=True))


future = nn.Transformer.generate_square_subsequent_mask(STEPS, dtype=torch.float64)
BATCH_FIRST: Any = {"batch_first": True}
LAYERS: Any = {"batch_first": True, "bidirectional": True, "num_layers": 2}

MODELS: dict[str, tuple[Callable[[], nn.Module], Call]] = {
    "encoder": (lambda: encoder(batch_first=True), encode),
    "encoder, norm first": (lambda: encoder(batch_first=True, norm_first=True), encode),
    "encoder, time first": (encoder, time_first(encode)),
    "encoder, norm first, time first": (lambda: encoder(norm_first=True), time_first(encode)),
    "encoder, gelu": (lambda: encoder(batch_first=True, activation="gelu"), encode),
    "causal encoder": (lambda: encoder(batch_first=True), partial(encode, mask=future, is_causal=True)),
    "encoder with a mask": (lambda: encoder(batch_first=True), partial(encode, mask=future)),
    "encoder with padding": (
        lambda: encoder(batch_first=True),
        partial(encode, src_key_padding_mask=torch.eye(B, STEPS) > 0),
    ),
    "decoder": (lambda: decoder(batch_first=True), decode),
    "decoder, time first": (decoder, time_first(decode)),
    "causal decoder, norm first": (
        lambda: decoder(batch_first=True, norm_first=True),
        partial(decode, tgt_mask=future, tgt_is_causal=True),
    ),
    "transformer": (lambda: transformer(batch_first=True), partial(translate, tgt_mask=future)),
    "transformer, time first": (transformer, time_first(translate)),
    "attention": (lambda: attention(batch_first=True), attend),
    "attention, time first": (attention, time_first(attend)),
    "cross attention": (lambda: attention(batch_first=True), attend_to_other),
    "cross attention, time first, without biases": (lambda: attention(bias=False), time_first(attend_to_other)),
    "attention with separate weights": (lambda: attention(**BATCH_FIRST, kdim=WIDTH, vdim=WIDTH), attend_to_other),
    **{
        f"{kind.__name__}, {name}": (lambda k=kind, o=options: k(WIDTH, 5, **o), call)
        for kind in (nn.LSTM, nn.GRU)
        for name, options, call in (
            ("batch first", BATCH_FIRST, recur),
            ("time first", {}, time_first(recur)),
            ("both directions, two layers", LAYERS, recur),
            ("dropout", {**LAYERS, "dropout": 0.4}, recur),
        )
    },
    "LSTM, projected": (lambda: nn.LSTM(WIDTH, 5, batch_first=True, proj_size=3, num_layers=2), recur),
    "RNN": (lambda: nn.RNN(WIDTH, 5, batch_first=True, nonlinearity="relu"), recur),
    "GRU, without biases": (lambda: nn.GRU(WIDTH, 5, batch_first=True, bias=False), recur),
    "pooled mean": pooled(lambda x: x.mean(1)),
    "pooled amax": pooled(lambda x: x.amax(1)),
    "first token": pooled(lambda x: x[:, 0]),
    "positions": (with_embeddings, partial(embedded, with_batch=True)),
    "positions without a batch": (with_embeddings, partial(embedded, with_batch=False)),
}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]().double()


def packed_pair(kind: str) -> tuple[Tensor, Tensor]:
    return batch(kind, WIDTH).to_packed(), batch("padding" if kind == "holes" else kind, WIDTH, seed=3).to_packed()


def results_of(name: str, model: nn.Module, given: tuple[Tensor, Tensor], policy: str) -> list[Tensor]:
    torch.manual_seed(1)
    with md.densify(policy):
        out = MODELS[name][1](model, *given)
    return list(out) if isinstance(out, tuple) else [out]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_and_evaluation_stay_packed(name: str, kind: str) -> None:
    model, given = make(name), packed_pair(kind)
    twin, padded = copy.deepcopy(model), tuple(x.to_dense() for x in given)
    found, expected = results_of(name, model, given, "never"), results_of(name, twin, padded, "auto")
    close(found, expected, check_extent=True)
    for results, policy in ((found, "never"), (expected, "auto")):
        with md.densify(policy):
            sum((r.square() + r).mean().to_tensor(0) for r in results).backward()
    for (parameter, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert type(mine.grad) is type(other.grad) in (Tensor, type(None)), parameter
        if mine.grad is not None:
            close(mine.grad, other.grad, msg=lambda text, p=parameter: f"{p}: {text}")
    with torch.no_grad():
        found, expected = (
            results_of(name, model.eval(), given, "never"),
            results_of(name, twin.eval(), padded, "auto"),
        )
    close(found, expected, check_extent=True)


class Allocations(TorchDispatchMode):
    """The shapes of all plain tensors with memory that operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if type(tensor) is Tensor and tensor.device.type != "meta":
                self.shapes.add(tuple(tensor.shape))
        return result

    def with_rows(self, rows: int) -> set[tuple[int, ...]]:
        """The shapes that have so many rows of more than one number, in one dimension or divided into two."""
        return {
            shape
            for shape in self.shapes
            if any(
                math.prod(shape[n : n + width]) == rows and math.prod(shape[n + width :]) > 1
                for n in range(len(shape))
                for width in (1, 2)
            )
        }


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("policy", ["never", "always"])
@pytest.mark.parametrize("name", ["encoder", "transformer, time first", "LSTM, batch first"])
def test_no_padded_batch_is_allocated(name: str, policy: str, training: bool) -> None:
    """Nothing of (B, T, …) elements is made, though the policy allows it; the test sees it for padded batches."""
    model, rows = make(name).train(training), 7 * 13  # a number that no width or batch has
    lengths = torch.tensor([13, 2, 5, 1, 3, 4, 6])
    data = torch.randn(7, 13, WIDTH, dtype=torch.float64)
    padded = md.masked_tensor(data, (torch.arange(13) < lengths[:, None])[..., None])
    packed = padded.to_packed()
    seen = []
    for x in (packed, padded):
        with torch.set_grad_enabled(training), Allocations() as allocations:
            loss = results_of(name, model, (x, x), policy)[0].mean()
            if training:
                with md.densify(policy):
                    loss.backward()
        seen.append(allocations.with_rows(rows))
    assert seen[0] == set()
    assert seen[1] != set()
