"""P9 for random programs: a padded batch gives what its samples give one by one, in every step, and their gradients.

A step that is refused ends the program. Of a sample of length 0, or one of which a step leaves nothing, nothing is
claimed from there on if the batch has nothing valid for it.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.compare import difference
from op_registry.conformance.plain_torch import one_line
from op_registry.conformance.subject import Subject
from op_registry.errors import MaskedSemanticsError
from op_registry.fuzz import padded_steps, ragged
from op_registry.fuzz.programs import Program, Source, Step
from op_registry.fuzz.running import execute

AXES: tuple[padded_steps.Axes, ...] = (
    ("B", "T", 4), ("B", "T", 4), ("B", "S", 4), ("B", 3, "T"), ("B", 2, "H", "W"), ("B", 4), ("B", "T", 2),
)  # fmt: skip
LONGEST = 6
ATTEMPTS = 200
MOST_DIMS = 5


def program_of_samples(seed: int, most_steps: int) -> Program:
    """The program of a seed: ragged sources, and lines that are the same for a batch and for a sample."""
    rng = random.Random(seed)
    batch = rng.randint(2, 4)
    sizes = {axis: rng.randint(1, LONGEST) for axis in "THWS"}
    missing = rng.random() < 0.5
    sources, values = [], []
    for n in range(rng.randint(2, 4)):
        axes = rng.choice(AXES)
        shape = tuple(batch if a == "B" else sizes[a] if isinstance(a, str) else a for a in axes)
        mask = "random" if missing else "plain"
        grad = rng.random() < 0.7
        sources.append(
            Source(f"x{n}", shape, "float64", rng.randrange(1 << 30) | 1, mask, requires_grad=grad, axes=axes)
        )
        values.append((f"x{n}", axes))
    steps: list[Step] = []
    for _ in range(rng.randint(3, most_steps)):
        for _ in range(ATTEMPTS):
            drawn = _drawn(rng, values)
            if drawn is None or len(drawn[0].axes) > MOST_DIMS:
                continue
            line, operands = drawn
            code, weights = line.code, []
            for w, size in enumerate(line.weights):
                name = f"w{len(sources)}"
                sources.append(Source(name, size, "float64", rng.randrange(1 << 30) | 1, "plain", requires_grad=True))
                code = code.replace(f"{{w{w}}}", f"{{{len(operands) + w}}}")
                weights.append(name)
            steps.append(Step(f"v{len(steps)}", code, (*operands, *weights)))
            values.append((steps[-1].name, line.axes))
            break
    return Program(seed, tuple(sources), tuple(steps))


def _drawn(
    rng: random.Random, values: list[tuple[str, padded_steps.Axes]]
) -> tuple[padded_steps.Line, tuple[str, ...]] | None:
    first = values[-1] if rng.random() < 0.6 else rng.choice(values)  # chains find more
    if rng.random() < 0.25:
        second = rng.choice(values)
        line = rng.choice(padded_steps.PAIRS)(rng, first[1], second[1])
        return None if line is None else (line, (first[0], second[0]))
    line = rng.choice(padded_steps.KINDS)(rng, first[1])
    return None if line is None else (line, (first[0],))


def batch_is_its_samples(program: Program, subject: Subject) -> str | None:
    """P9: at the positions that are there, values, masks and gradients are those of the samples by themselves."""
    rows = range(next(s for s in program.sources if s.axes).shape[0])
    batch = {s.name: ragged.batch(s, program.seed, subject, s.requires_grad) for s in program.sources}
    leaves = {name: value for name, value in batch.items() if subject.requires_grad(value)}
    alone = [_of_sample(program, row, subject) for row in rows]
    ones = [dict(values) for values in alone]
    open_rows = {row for row in rows if ragged.has_empty(program.sources, row, program.seed)}
    held: set[int] = set()
    last = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in program.steps:
            if not all(name in batch for name in step.operands):
                continue
            errors = [
                execute(step, one, program.seed) if all(name in one for name in step.operands) else KeyError()
                for one in ones
            ]
            if all(error is not None for error in errors):
                continue
            error = execute(step, batch, program.seed)
            if isinstance(error, MaskedSemanticsError):
                break
            if error is not None:
                return f"{step.name} raises {one_line(error)}, and a sample by itself gives a result"
            open_rows |= {row for row, one in enumerate(ones) if _is_empty(one.get(step.name))}
            for row in rows:
                if errors[row] is not None or row in held:
                    held.add(row)
                    continue
                wrong = _difference(batch[step.name], ones[row][step.name], row, subject)
                if wrong is not None and row in open_rows:
                    held.add(row)  # nothing is claimed of what is made of nothing
                elif wrong is not None:
                    return f"{step.name} of sample {row}: {wrong}"
            last = step.name
    if last is None or held or open_rows:
        return None
    return _gradients_differ(batch[last], [one[last] for one in ones], leaves, alone, program, subject)


def _of_sample(program: Program, row: int, subject: Subject) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for source in program.sources:
        if not source.axes:
            values[source.name] = ragged.batch(source, program.seed, subject, source.requires_grad)
            continue
        data, mask = ragged.samples(source, program.seed)[row]
        plain = data.requires_grad_(source.requires_grad)
        values[source.name] = (
            plain if mask is None else subject.wrap(data.detach(), mask, requires_grad=source.requires_grad)
        )
    return values


def _is_empty(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 0


def _seen(value: Any, row: int, subject: Subject) -> tuple[Tensor, Tensor]:
    """The elements of a sample in a batch that are there, in order, and which of them are valid."""
    data, mask = subject.observe(value)
    there = subject.extent(value)
    valid = torch.ones(data.shape, dtype=torch.bool) if mask is None else mask.expand(data.shape)
    if there is None:
        return data[row].flatten(), valid[row].flatten()
    return data[row][there[row]], valid[row][there[row]]


def _alone(value: Any, subject: Subject) -> tuple[Tensor, Tensor]:
    data, mask = subject.observe(value) if subject.is_value(value) else (value.detach(), None)
    valid = torch.ones(data.shape, dtype=torch.bool) if mask is None else mask.expand(data.shape)
    return data.flatten(), valid.flatten()


def _difference(value: Any, sample: Any, row: int, subject: Subject) -> str | None:
    got, valid = _seen(value, row, subject) if subject.is_value(value) else (value[row].detach().flatten(), None)
    want, wanted = _alone(sample, subject)
    if got.shape != want.shape:
        return f"{got.numel()} elements are there instead of {want.numel()}"
    if valid is not None and not torch.equal(valid, wanted):
        return f"{int(valid.sum())} elements are valid instead of {int(wanted.sum())}"
    return difference(got, want, wanted)


def _weighted(data: Tensor, valid: Tensor) -> Tensor:
    weights = torch.linspace(0.5, 1.5, data.numel(), dtype=data.dtype)
    return torch.where(valid, data, 0).tanh().mul(weights).sum()


def _scalar(value: Any, row: int | None, subject: Subject) -> Tensor:
    """A number in which each element of a sample that is there and valid has its own weight."""
    masked = subject.is_value(value)
    there = subject.extent(value) if masked else None
    data, mask = subject.observe(value) if masked else (value, None)
    valid = torch.ones(data.shape, dtype=torch.bool) if mask is None else mask.expand(data.shape)
    if row is not None:
        data, valid = data[row], valid[row]
        if there is not None:
            data, valid = data[there[row]], valid[there[row]]
    return _weighted(data.flatten(), valid.flatten())


def _gradients_differ(
    value: Any,
    samples: list[Any],
    leaves: Mapping[str, Any],
    alone: list[dict[str, Any]],
    program: Program,
    subject: Subject,
) -> str | None:
    total = sum((_scalar(value, row, subject) for row in range(len(samples))), torch.zeros((), dtype=torch.float64))
    if not total.requires_grad or not bool(torch.isfinite(total)):
        return None
    got = dict(zip(leaves, subject.gradients(total, list(leaves.values())), strict=True))
    singles = [_scalar(sample, None, subject) for sample in samples]
    want: list[dict[str, Any]] = []
    for single, values in zip(singles, alone, strict=True):
        wanted = {name: values[name] for name in leaves}
        found = subject.gradients(single, list(wanted.values())) if single.requires_grad else [None] * len(wanted)
        want.append(dict(zip(wanted, found, strict=True)))
    for source in program.sources:
        if source.name in got:
            wrong = _gradient_differs(source, got[source.name], [w[source.name] for w in want], program.seed, subject)
            if wrong is not None:
                return f"gradient of {source.name}: {wrong}"
    return None


def _gradient_differs(source: Source, got: Any, want: list[Any], seed: int, subject: Subject) -> str | None:
    def plain(gradient: Any, shape: Any) -> Tensor:
        if gradient is None:
            return torch.zeros(shape, dtype=torch.float64)
        data, mask = subject.observe(gradient) if subject.is_value(gradient) else (gradient, None)
        return data if mask is None else torch.where(mask, data, 0)

    whole = plain(got, source.shape)
    if not source.axes:
        return difference(whole, sum((plain(w, source.shape) for w in want), torch.zeros(source.shape)), None)
    there = ragged.there(source, seed)
    if bool((whole[~there] != 0).any()):
        return "it is not zero in the padding"
    for row, gradient in enumerate(want):
        sizes = [p.stop - p.start for p in ragged.places(source, seed)[row]]
        wrong = difference(whole[row][there[row]], plain(gradient, (1, *sizes)).flatten(), None)
        if wrong is not None:
            return f"of sample {row}: {wrong}"
    return None
