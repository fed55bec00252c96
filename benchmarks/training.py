"""R14: an eager training step, and an evaluation, of stock models on a padded batch of which 66 % of tokens are valid.

The reference is the same model on plain tensors with its own padding-mask argument, and a loss over the valid tokens.
Every step makes its mask anew, as a data loader would. Losses and gradients are compared before anything is timed. The
second table is of evaluation without gradients, where torch's encoder takes its nested fast path by default.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import masked_dispatch as md
from benchmarks.harness import Call, Goal, console, duration, measure, print_table, progress, timing
from benchmarks.peak import GIVING_BACK, peak_of_call, peak_of_process

PLAIN, DENSE, PACKED = "plain, padding mask", "masked", "masked, packed"


@dataclass(frozen=True)
class Size:
    """A batch and a model: sequences, tokens of the longest one, width, heads, layers."""

    name: str
    batch: int
    time: int
    width: int
    heads: int
    layers: int

    def __str__(self) -> str:
        return f"{self.name} ({self.batch}, {self.time}, {self.width}, {self.heads}, {self.layers})"


LARGE, SMALL = Size("large", 16, 128, 256, 8, 2), Size("small", 8, 64, 64, 4, 2)
SIZES = {size.name: size for size in (LARGE, SMALL)}


def encoder(size: Size) -> tuple[nn.Module, Callable[..., Tensor]]:
    """nn.TransformerEncoder as torch ships it, and how it is called with a padding mask or without."""
    layer = nn.TransformerEncoderLayer(size.width, size.heads, 4 * size.width, dropout=0.0, batch_first=True)
    module = nn.TransformerEncoder(layer, size.layers)

    def call(module: nn.Module, x: Tensor, valid: Tensor | None = None) -> Tensor:
        return module(x) if valid is None else module(x, src_key_padding_mask=~valid)

    return module, call


def bert(size: Size) -> tuple[nn.Module, Callable[..., Tensor]]:
    """transformers' BERT encoder, from embeddings."""
    from transformers import BertConfig, BertModel

    options: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "vocab_size": 8}
    config = BertConfig(
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.width,
        attn_implementation="sdpa",
        **options,
    )

    def call(module: nn.Module, x: Tensor, valid: Tensor | None = None) -> Tensor:
        given = {} if valid is None else {"attention_mask": valid.to(torch.int64)}
        result: Tensor = module(inputs_embeds=x, **given).last_hidden_state
        return result

    return BertModel(config, add_pooling_layer=False), call


MODELS = {"nn.TransformerEncoder": encoder, "BERT": bert}
# What is promised for each size: training step and evaluation, masked and packed.
GOALS = {LARGE: ((1.15, 0.8), (1.05, 0.75)), SMALL: ((2.4, 2.2), (1.5, 2.2))}


def lengths_of(size: Size) -> Tensor:
    """Between a third of the tokens and all of them, 66 % on average; one sequence is as long as the batch."""
    drawn = torch.randint(
        size.time // 3, size.time + 1, (size.batch,), generator=torch.Generator().manual_seed(1), device="cpu"
    )
    drawn[0] = size.time
    return drawn


def candidates(
    model: str, size: Size, backward: bool, compiled: bool = False, device: str = "cpu"
) -> dict[str, tuple[nn.Module, Call]]:
    """For each way to train or evaluate: its copy of the model, and the step, which gives the loss and leaves gradients
    in the copy. `compiled`: the loss is a compiled function, which is compiled at the first step.
    """
    torch.manual_seed(0)
    module, call = MODELS[model](size)
    module.train(backward).to(device)
    x, lengths = torch.randn(size.batch, size.time, size.width, device=device), lengths_of(size).to(device)

    def valid() -> Tensor:
        return torch.arange(size.time, device=device) < lengths[:, None]

    def plain(module: nn.Module, there: Tensor) -> Tensor:
        out = call(module, x, there)
        return torch.where(there[..., None], out, 0).sum() / (there.sum() * size.width)

    def masked(module: nn.Module, batch: Tensor) -> Tensor:
        return call(module, batch).mean()

    def step(make: Callable[[], Tensor], loss: Callable[[nn.Module, Tensor], Tensor], module: nn.Module) -> Tensor:
        batch = make()  # as a data loader does: no part of what is compiled
        if not backward:
            with torch.no_grad():
                return loss(module, batch)
        module.zero_grad(set_to_none=True)
        value = loss(module, batch)
        value.backward()
        return value.detach()

    ways: dict[str, tuple[Callable[[], Tensor], Callable[[nn.Module, Tensor], Tensor]]] = {
        PLAIN: (valid, plain),
        DENSE: (lambda: md.as_masked_tensor(x, valid()[..., None]), masked),
        PACKED: (lambda: md.from_lengths(x, lengths).to_packed(), masked),
    }
    steps: dict[str, tuple[nn.Module, Call]] = {}
    for name, (make, loss) in ways.items():
        copied = copy.deepcopy(module)
        steps[name] = (copied, functools.partial(step, make, torch.compile(loss) if compiled else loss, copied))
    return steps


def check_steps(steps: dict[str, tuple[nn.Module, Call]]) -> None:
    """Every candidate has the loss, and leaves the gradients, of the plain one; after an evaluation there are none."""
    found: dict[str, dict[str, Tensor | None]] = {}
    for name, (module, step) in steps.items():
        loss = step()
        assert isinstance(loss, Tensor)
        gradients = {parameter: p.grad for parameter, p in module.named_parameters()}
        found[name] = {"loss": loss.to_tensor(0) if md.is_masked_tensor(loss) else loss, **gradients}
    for name, values in found.items():
        for what, value in values.items():
            torch.testing.assert_close(
                value,
                found[PLAIN][what],
                rtol=1e-3,
                atol=1e-6,
                msg=lambda m, at=(name, what): f"{at}: {m}",
            )


def peak_of(model: str, size: Size, backward: bool, name: str) -> float:
    """What a second step allocates at most, in MiB, in a process of its own."""
    mode = "train" if backward else "eval"
    return peak_of_process("benchmarks.training", model, size.name, mode, name, allocator=GIVING_BACK)


def measure_peak(model: str, size: str, mode: str, name: str) -> float:
    """The same, in this process."""
    torch.set_num_threads(1)
    module, step = candidates(model, SIZES[size], mode == "train")[name]
    step()
    module.zero_grad(set_to_none=True)
    return peak_of_call(step)


def run(rounds: int = 15) -> list[Goal]:
    """Measure and print; what was promised."""
    goals = []
    models = [name for name in MODELS if name != "BERT" or importlib.util.find_spec("transformers")]
    if "BERT" not in models:
        console.print("BERT is left out: transformers is not installed (pip install transformers)")
    cases = [(model, size, backward) for model in models for size in (LARGE, SMALL) for backward in (True, False)]
    for name, (model, size, backward) in zip(progress([str(c) for c in cases], "training"), cases, strict=True):
        steps = candidates(model, size, backward)
        check_steps(steps)
        measured = measure({name: step for name, (_, step) in steps.items()}, rounds=rounds, warm_up=2)
        timings = {name: timing(seconds, measured[PLAIN]) for name, seconds in measured.items()}
        peaks = {n: peak_of(model, size, backward, n) for n in timings} if sys.platform == "linux" else {}
        work = "training step" if backward else "evaluation"
        print_table(
            f"{model}, {size}: {work}",
            ("", "time", "× plain", "quartiles", "peak MiB"),
            [
                (n, duration(t.seconds), str(t), f"{t.low:.2f}–{t.high:.2f}", f"{peaks[n]:.0f}" if n in peaks else "–")
                for n, t in timings.items()
            ],
        )
        for n, bound in zip((DENSE, PACKED), GOALS[size][0 if backward else 1], strict=True):
            goals.append(Goal(f"{model}, {size.name}, {work}, {n}, × plain", timings[n].ratio, bound))
            if peaks and size is LARGE and backward:
                goals.append(Goal(f"{model}, {size.name}, {work}, {n}, peak × plain's", peaks[n] / peaks[PLAIN], 1.1))
    return goals


if __name__ == "__main__":
    print(measure_peak(*sys.argv[1:]))
