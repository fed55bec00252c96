"""How a model is asked whether a padded batch gives what its samples give, and what is said where it doesn't."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import masked_dispatch as md

# Lengths of the samples of a batch.
AMOUNTS = ([5, 2, 7], [4, 1, 6, 3], [8, 5])
WIDTH = 4
SIDES = ("right", "left", "centre")
# What can come of a model, the best first. The last two are faults of the library.
OUTCOMES = ("right", "refused", "warned", "audit", "raised", "wrong")


@dataclass(frozen=True)
class Model:
    """A model by name. It is the same code for a batch and for one sample, and isn't told what is padding.

    build   makes the module
    inputs  of each input "steps": (B, T, 4); "more steps": the same with other lengths; "points": (B, T, 3); "graph":
            (B, T, T); "image": (B, 4, H, W); "picture": (B, 3, H, W); "wave": (B, 60 T); "vector": (B, 4)
    least   the least length that it takes
    times   what lengths are multiplied by: 8 for a model that halves them three times
    exact   False for a model that computes in float32 whatever it is given
    library   what it is from, as it is imported
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: tuple[str, ...] = ("steps",)
    least: int = 1
    times: int = 1
    exact: bool = True
    library: str = "torch"

    @property
    def missing(self) -> str:
        """Why it can't be asked, or nothing."""
        return "" if importlib.util.find_spec(self.library) else f"No module named {self.library!r}"

    @property
    def version(self) -> str:
        """The library and, if it is not torch, its version."""
        if self.library == "torch" or self.missing:
            return self.library
        return f"{self.library} {importlib.metadata.version(distributions()[self.library][0])}"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.exact else torch.float32

    def make(self) -> nn.Module:
        """The module, training if its samples then don't depend on each other and nothing is drawn."""
        torch.manual_seed(0)
        module = self.build().to(self.dtype)
        return module.train(not any(map(_mixes_or_draws, module.modules())))


@functools.cache
def distributions() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


def _mixes_or_draws(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return bool(module.track_running_stats)
    return getattr(module, "p", 0) > 0 if isinstance(module, nn.modules.dropout._DropoutNd) else False


class Of(nn.Module):
    """Layers and what is done with them."""

    def __init__(self, run: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *inputs: Any) -> Any:
        return self.run(self, *inputs)


def models_of(table: str, names: Mapping[str, Any]) -> list[Model]:
    """A model for each row of a table: where it is from | how it is made | how it is asked | its name.

    A row goes on in lines that are indented. How it is made is Python with `names` and what is in the module that it is
    from. How it is asked are arguments of `Model`, and `run`, which says what is done with what was made and the
    inputs, if not made(*inputs).
    """
    names = {"Of": Of, **names}

    def model(path: str, made: str, asked: str = "", name: str = "") -> Model:
        maker, how = made.partition("(")[0], eval(f"dict({asked})", names)
        run = how.pop("run", None)

        def build() -> nn.Module:
            known = maker.partition(".")[0] in names
            module = eval(made, names if known else {**names, maker: load(f"{path}:{maker}")})
            return module if run is None else Of(lambda of, *inputs: run(of.made, *inputs), made=module)

        return Model(name or maker, build, **how, library=path.partition(".")[0])

    rows = re.sub(r"\n +", " ", table.strip()).splitlines()
    return [model(*map(str.strip, row.split("|"))) for row in rows]


def load(path: str) -> Any:
    """What is at `package.module:name`."""
    without_compiled_operators()
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


@functools.cache
def without_compiled_operators() -> None:
    """Let torchvision and torchaudio be imported beside any build of torch: what is asked of them is plain Python.

    The index has them compiled for one build of torch, another than the one for CPUs.
    """
    if importlib.util.find_spec("torchvision") is not None:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
    compiled: Any = ModuleType("torchaudio._extension")
    compiled._IS_TORCHAUDIO_EXT_AVAILABLE = False
    compiled.fail_if_no_align = lambda function: function
    sys.modules.setdefault(compiled.__name__, compiled)


# --------------------------------------------------------------------------------------------------- samples, batches


def samples_of(model: Model, lengths: Sequence[int]) -> list[list[Tensor]]:
    """For each input, its samples (1, …)."""
    generator = torch.Generator().manual_seed(sum(lengths))
    lengths = [model.times * max(n, model.least) for n in lengths]
    others = [*lengths[1:], lengths[0]]
    shapes = {
        "steps": [(n, WIDTH) for n in lengths],
        "more steps": [(n, WIDTH) for n in others],
        "points": [(n, 3) for n in lengths],
        "graph": [(n, n) for n in lengths],
        "image": [(WIDTH, n, m) for n, m in zip(lengths, others, strict=True)],
        "picture": [(3, n, m) for n, m in zip(lengths, others, strict=True)],
        "wave": [(60 * n,) for n in lengths],
        "vector": [(WIDTH,) for _ in lengths],
    }
    drawn = {
        kind: [torch.randn(1, *s, generator=generator, dtype=torch.float64) for s in shapes[kind]]
        for kind in model.inputs
    }
    if "graph" in drawn:
        drawn["graph"] = [(x + x.mT).sigmoid() for x in drawn["graph"]]
    return [[x.to(model.dtype) for x in drawn[kind]] for kind in model.inputs]


def padded_batch(samples: Sequence[Tensor], side: str, apart: bool = False) -> Tensor:
    """The samples as one batch with NaN around them; plain if they have one size.

    apart   its mask and its extent are two tensors
    """
    sizes = [max(s) for s in zip(*(x.shape[1:] for x in samples), strict=True)]
    data = torch.full((len(samples), *sizes), torch.nan, dtype=samples[0].dtype)
    there = torch.zeros(data.shape, dtype=torch.bool)
    for row, x in enumerate(samples):
        spare = [size - n for n, size in zip(x.shape[1:], sizes, strict=True)]
        before = [{"right": 0, "left": free, "centre": free // 2}[side] for free in spare]
        places = [slice(start, start + n) for start, n in zip(before, x.shape[1:], strict=True)]
        data[(row, *places)], there[(row, *places)] = x[0], True
    if bool(there.all()):
        return data
    dims = tuple(d + 1 for d in range(len(sizes)) if len({x.shape[d + 1] for x in samples}) > 1)
    return md.padded(md.masked_tensor(data, there), there.clone() if apart else None, dim=dims)


# ------------------------------------------------------------------------------------------------- batch against loop


@dataclass
class Step:
    """What a step of training gives: for each sample its results and the gradient of each input, and the parameters'
    gradients.
    """

    results: list[Tensor]
    of_inputs: list[list[Tensor]]
    of_parameters: list[Tensor | None]

    def difference(self, other: Step) -> float:
        """The greatest difference; infinity if something is there in one of them alone, or isn't valid."""
        pairs = [*zip(self.results, other.results, strict=True)]
        for mine, theirs in zip(self.of_inputs, other.of_inputs, strict=True):
            pairs += zip(mine, theirs, strict=True)
        for p, q in zip(self.of_parameters, other.of_parameters, strict=True):
            some = q if p is None else p
            if some is not None:
                pairs.append((torch.zeros_like(some) if p is None else p, torch.zeros_like(some) if q is None else q))
        return max(map(_difference, pairs), default=0.0)


def _difference(pair: tuple[Tensor, Tensor]) -> float:
    one, other = pair
    if one.shape != other.shape:
        return torch.inf
    return float((one - other).detach().abs().nan_to_num(torch.inf).max()) if one.numel() else 0.0


def step_of_loop(module: nn.Module, samples: list[list[Tensor]]) -> Step:
    module.zero_grad()
    leaves = [[x.clone().requires_grad_() for x in each] for each in samples]
    # Twice each: torch's batch_norm has a wrong gradient for a batch of one, if what arrives lies channels last.
    results = [torch.cat(_rows_of(module(*map(twice, inputs)), 0)) for inputs in zip(*leaves, strict=True)]
    weigh(results).backward()
    return Step(results, [[_gradient(x).flatten() for x in each] for each in leaves], _gradients(module))


def twice(x: Tensor) -> Tensor:
    return torch.cat([x, x])


def step_of_batch(module: nn.Module, batch: list[Tensor], rows: Sequence[int]) -> Step:
    module.zero_grad()
    batch = [x.detach().clone().requires_grad_() for x in batch]
    result = module(*batch)
    results = [torch.cat(_rows_of(result, row)) for row in rows]
    weigh(results).backward()
    of_inputs = [[elements_of(_gradient(x), row, like=x) for row in rows] for x in batch]
    return Step(results, of_inputs, _gradients(module))


def weigh(rows: Sequence[Tensor]) -> Tensor:
    """A scalar in which every element of a sample has its own weight."""
    return torch.stack([(r.tanh() * torch.linspace(0.5, 1.5, r.numel(), dtype=r.dtype)).sum() for r in rows]).sum()


def _rows_of(result: Any, row: int) -> list[Tensor]:
    return [elements_of(x, row) for x in (result if isinstance(result, (tuple, list)) else [result])]


def elements_of(result: Tensor, row: int, like: Tensor | None = None) -> Tensor:
    """The elements of one sample that are there, in the result or in `like`, in order; NaN where one is invalid."""
    extent = getattr(result if like is None else like, "extent", None)
    values = (result.to_tensor(torch.nan) if isinstance(result, md.MaskedTensor) else result)[row]
    return values.flatten() if extent is None else values[extent[row]]


def _gradient(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad


def _gradients(module: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


# ------------------------------------------------------------------------------------------------------------ outcomes


def verdict(model: Model, side: str) -> str:
    """The worst outcome of three batches, and what was said: `right`, `refused: …`, `warned: …`, `audit: …`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the library that the model is from
        module = model.make()
        found = [outcome(module, samples_of(model, lengths), side, apart=n == 1) for n, lengths in enumerate(AMOUNTS)]
    return max(found, key=lambda said: OUTCOMES.index(said.partition(":")[0]))


def outcome(module: nn.Module, samples: list[list[Tensor]], side: str, apart: bool) -> str:
    batch, rows = [padded_batch(each, side, apart) for each in samples], range(len(samples[0]))
    alone = step_of_loop(module, samples)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            worst = step_of_batch(module, batch, rows).difference(alone)
        except md.MaskedSemanticsError as error:
            return f"refused: {error}"
        except Exception as error:
            return f"raised: {type(error).__name__}: {error}"
    if worst < (1e-9 if samples[0][0].dtype == torch.float64 else 1e-4):
        return "right"
    said = [w.message for w in heard if w.category.__module__.startswith("masked_dispatch")]
    if said:
        return f"warned: {said[0]}"
    with md.audit() as report:
        step_of_batch(module, batch, rows)
    return f"audit: {report.findings[0].kind}" if report else f"wrong: differs by {worst:.1e}"
