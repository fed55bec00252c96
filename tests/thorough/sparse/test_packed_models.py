"""Stock models on packed batches stay packed from input to loss, with the values and gradients of the padded batch.

Both run in float64; under ``densify("never")`` an operator that leaves packed storage raises.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import masked_dispatch as md
from packed_batches import KINDS, B, batch, filled, mask_of

WIDTH, HEADS, STEPS, WORDS = 8, 2, 6, 11

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")

# A model of (source, target), whose second argument some ignore.
Model = Callable[[Tensor, Tensor], Any]


def encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 12, dropout=0.0, **options)
    return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)


def decoder(**options: Any) -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, HEADS, 12, dropout=0.0, **options), 2)


def transformer(**options: Any) -> nn.Module:
    return nn.Transformer(WIDTH, HEADS, 1, 1, 12, dropout=0.0, **options)


def time_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


class Encode(nn.Module):
    """A module of one sequence, on sequences of either order."""

    def __init__(self, module: nn.Module, batch_first: bool, **arguments: Any) -> None:
        super().__init__()
        self.module, self.batch_first, self.arguments = module, batch_first, arguments

    def forward(self, source: Tensor, target: Tensor) -> Any:
        if self.batch_first:
            return self.module(source, **self.arguments)
        return time_first(self.module(time_first(source), **self.arguments))


class Translate(nn.Module):
    """A module of a target and what it attends to, on sequences of either order."""

    def __init__(self, module: nn.Module, batch_first: bool, source_first: bool, **arguments: Any) -> None:
        super().__init__()
        self.module, self.batch_first, self.source_first = module, batch_first, source_first
        self.arguments = arguments

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        given = (source, target) if self.source_first else (target, source)
        if self.batch_first:
            return self.module(*given, **self.arguments)
        return time_first(self.module(*map(time_first, given), **self.arguments))


class Attend(nn.Module):
    """nn.MultiheadAttention, of one sequence to itself or to another."""

    def __init__(self, batch_first: bool, cross: bool, **options: Any) -> None:
        super().__init__()
        self.module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first, **options)
        self.batch_first, self.cross = batch_first, cross

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        keys = target if self.cross else source
        given = (source, keys) if self.batch_first else (time_first(source), time_first(keys))
        keys = given[0] if not self.cross else given[1]
        attended = self.module(given[0], keys, keys, need_weights=False)[0]
        return attended if self.batch_first else time_first(attended)


class Recurrent(nn.Module):
    """A recurrent network; its last states are results, too."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.module = kind(WIDTH, 5, **options)

    def forward(self, source: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        out, state = self.module(source if self.module.batch_first else time_first(source))
        states = state if isinstance(state, tuple) else (state,)
        return (out if self.module.batch_first else time_first(out), *states)


class Pooled(nn.Module):
    """Pooling over time, then a linear layer."""

    def __init__(self, pool: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.pool, self.module, self.head = pool, encoder(batch_first=True), nn.Linear(WIDTH, 3)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.head(self.pool(self.module(source)))


class Embedded(nn.Module):
    """Sums with embeddings of positions."""

    def __init__(self, with_batch: bool) -> None:
        super().__init__()
        sizes = (1, STEPS, WIDTH) if with_batch else (STEPS, WIDTH)
        self.positions = nn.Parameter(torch.randn(sizes))
        self.words, self.module = nn.Embedding(WORDS, WIDTH), encoder(batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        indices = (source[..., 0] * 100).long().abs() % WORDS
        return self.module(self.words(indices) + self.positions + source)


future = nn.Transformer.generate_square_subsequent_mask(STEPS, dtype=torch.float64)

MODELS: dict[str, Callable[[], nn.Module]] = {
    **{
        f"encoder, {'norm first' if norm_first else 'norm last'}, {'batch' if batch_first else 'time'} first": (
            lambda n=norm_first, b=batch_first: Encode(encoder(batch_first=b, norm_first=n), b)
        )
        for norm_first in (False, True)
        for batch_first in (False, True)
    },
    "encoder, gelu": lambda: Encode(encoder(batch_first=True, activation="gelu"), True),
    "causal encoder": lambda: Encode(encoder(batch_first=True), True, mask=future, is_causal=True),
    "encoder with a mask": lambda: Encode(encoder(batch_first=True), True, mask=future),
    "encoder with padding": lambda: Encode(
        encoder(batch_first=True), True, src_key_padding_mask=torch.eye(B, STEPS) > 0
    ),
    "decoder": lambda: Translate(decoder(batch_first=True), True, False),
    "decoder, time first": lambda: Translate(decoder(), False, False),
    "causal decoder, norm first": lambda: Translate(
        decoder(batch_first=True, norm_first=True), True, False, tgt_mask=future, tgt_is_causal=True
    ),
    "transformer": lambda: Translate(transformer(batch_first=True), True, True, tgt_mask=future),
    "transformer, time first": lambda: Translate(transformer(), False, True),
    "attention": lambda: Attend(True, False),
    "attention, time first": lambda: Attend(False, False),
    "cross attention": lambda: Attend(True, True),
    "cross attention, time first, without biases": lambda: Attend(False, True, bias=False),
    "attention with separate weights": lambda: Attend(True, True, kdim=WIDTH, vdim=WIDTH),
    **{
        f"{kind.__name__}, {name}": lambda k=kind, o=options: Recurrent(k, **o)
        for kind in (nn.LSTM, nn.GRU)
        for name, options in {
            "batch first": {"batch_first": True},
            "time first": {},
            "both directions, two layers": {"batch_first": True, "bidirectional": True, "num_layers": 2},
            "dropout": {"batch_first": True, "bidirectional": True, "num_layers": 2, "dropout": 0.4},
        }.items()
    },
    "LSTM, projected": lambda: Recurrent(nn.LSTM, batch_first=True, proj_size=3, num_layers=2),
    "RNN": lambda: Recurrent(nn.RNN, batch_first=True, nonlinearity="relu"),
    "GRU, without biases": lambda: Recurrent(nn.GRU, batch_first=True, bias=False),
    "pooled mean": lambda: Pooled(lambda x: x.mean(1)),
    "pooled amax": lambda: Pooled(lambda x: x.amax(1)),
    "first token": lambda: Pooled(lambda x: x[:, 0]),
    "positions": lambda: Embedded(True),
    "positions without a batch": lambda: Embedded(False),
}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


def packed_pair(kind: str) -> tuple[Tensor, Tensor]:
    return batch(kind, WIDTH).to_packed(), batch("padding" if kind == "holes" else kind, WIDTH, seed=3).to_packed()


def assert_same(a: Tensor, b: Tensor) -> None:
    assert a.shape == b.shape
    assert torch.equal(mask_of(a), mask_of(b))
    torch.testing.assert_close(filled(a), filled(b), rtol=1e-10, atol=1e-10)


def train(model: nn.Module, source: Tensor, target: Tensor, policy: str) -> tuple[list[Tensor], list[Tensor | None]]:
    """What the model returns, and the gradients of its parameters after one step of the masked mean."""
    torch.manual_seed(1)
    with md.densify(policy):
        out = model(source, target)
        outputs = list(out) if isinstance(out, tuple) else [out]
        loss = sum((o.square() + o).mean().to_tensor(0) for o in outputs)
        loss.backward()
    return outputs, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_stays_packed(name: str, kind: str) -> None:
    model = make(name)
    twin = copy.deepcopy(model)
    given = packed_pair(kind)
    expected, expected_gradients = train(twin, *(x.to_dense() for x in given), "auto")
    found, gradients = train(model, *given, "never")
    for a, b in zip(found, expected, strict=True):
        assert_same(a, b)
    for (parameter, _), a, b in zip(model.named_parameters(), gradients, expected_gradients, strict=True):
        assert (a is None) == (b is None), parameter
        if a is not None:
            assert type(a) is Tensor, parameter
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=lambda text, p=parameter: f"{p}: {text}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_evaluation_stays_packed(name: str, kind: str) -> None:
    model = make(name).eval()
    given = packed_pair(kind)
    with torch.no_grad():
        expected = model(*(x.to_dense() for x in given))
        with md.densify("never"):
            found = model(*given)
    outputs = (found, expected) if isinstance(found, tuple) else ([found], [expected])
    for a, b in zip(*outputs, strict=True):
        assert_same(a, b)


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
@pytest.mark.parametrize("name", ["encoder, norm last, batch first", "transformer, time first", "LSTM, batch first"])
def test_no_padded_batch_is_allocated(name: str, policy: str, training: bool) -> None:
    """Nothing of (B, T, …) elements is made, though the policy allows it; the test sees it for padded batches."""
    model, rows = make(name).train(training), 7 * 13  # a number that no width or batch has
    lengths = torch.tensor([13, 2, 5, 1, 3, 4, 6])
    data = torch.randn(7, 13, WIDTH, dtype=torch.float64)
    padded = md.masked_tensor(data, (torch.arange(13) < lengths[:, None])[..., None])
    packed = padded.to_packed()
    seen = []
    for x in (packed, padded):
        with torch.set_grad_enabled(training), md.densify(policy), Allocations() as allocations:
            out = model(x, x)
            loss = (out[0] if isinstance(out, tuple) else out).mean()
            if training:
                loss.backward()
        seen.append(allocations.with_rows(rows))
    assert seen[0] == set()
    assert seen[1] != set()
