"""P9 for random programs: a padded batch gives what its samples give one by one, in every step, and their gradients.

A step that is refused ends the program. Of a sample of length 0, or one of which a step leaves nothing, nothing is
claimed from there on if the batch has nothing valid for it.
"""

from __future__ import annotations

import random
import re
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

# Letters are dimensions in which samples differ, numbers are features.
AXES: tuple[tuple[str | int, ...], ...] = (
    ("B", "T", 4), ("B", "T", 4), ("B", "S", 4), ("B", 3, "T"), ("B", 2, "H", "W"), ("B", 4), ("B", "T", 2),
)  # fmt: skip
LONGEST = 6
# Lengths along each axis that no sample has, each of them another.
LONGER = {"T": 13, "H": 11, "W": 17, "S": 19}
ATTEMPTS = 200
MOST_DIMS = 5
MOST_FEATURES = 16
LARGEST = 50_000  # elements of a value of longer samples
# Cuts that a join may not go before: one that happens to be at the join's border gives a part back, which is not what a
# cut of the sample's own positions gives.
FROM_THE_START = re.compile(r" (\d:|:\d|::2)")


def program_of_samples(seed: int, most_steps: int) -> Program:
    """The program of a seed: ragged sources, and lines that are the same for a batch and for a sample."""
    state = _State(random.Random(seed))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state.add_sources()
        for _ in range(state.rng.randint(3, most_steps)):
            state.add_step()
    return Program(seed, tuple(state.sources), tuple(state.steps))


class _State:
    """A program under construction.

    batch, longer  its values in plain torch, in the sizes of the batch and of longer samples: dimensions whose sizes
                   differ are those in which samples do
    joined         the values that contain a join
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.sources: list[Source] = []
        self.steps: list[Step] = []
        self.batch: dict[str, Tensor] = {}
        self.longer: dict[str, Tensor] = {}
        self.joined: set[str] = set()

    def add_sources(self) -> None:
        sizes = {axis: self.rng.randint(1, LONGEST) for axis in LONGER}
        sizes["B"] = self.rng.randint(2, 4)
        mask = self.rng.choice(("random", "plain"))
        for n in range(self.rng.randint(2, 4)):
            axes = self.rng.choice(AXES)
            shape, longer = (tuple(a if isinstance(a, int) else s[a] for a in axes) for s in (sizes, sizes | LONGER))
            self._add_source(f"x{n}", shape, mask, self.rng.random() < 0.7, axes)
            self.batch[f"x{n}"], self.longer[f"x{n}"] = _zeros(shape), _zeros(longer)

    def _add_source(
        self, name: str, shape: tuple[int, ...], mask: str, requires_grad: bool, axes: tuple[str | int, ...] = ()
    ) -> None:
        seed = self.rng.randrange(1 << 30) | 1
        self.sources.append(Source(name, shape, "float64", seed, mask, requires_grad=requires_grad, axes=axes))

    def add_step(self) -> None:
        """Add a line that torch runs in both sizes, unless none is found."""
        names = list(self.batch)
        for _ in range(ATTEMPTS):
            operands = [names[-1] if self.rng.random() < 0.6 else self.rng.choice(names)]  # chains find more
            if self.rng.random() < 0.25:
                operands.append(self.rng.choice(names))
            kinds = [_kinds(self.batch[name], self.longer[name]) for name in operands]
            line = padded_steps.drawn(kinds, self.batch[operands[0]].shape, self.rng)
            if line is not None and self._accept(operands, *line):
                return

    def _accept(self, operands: list[str], code: str, weights: list[tuple[int, ...]]) -> bool:
        """Run a line in both sizes; keep it if its result has a reasonable size."""
        joins = not self.joined.isdisjoint(operands)
        if joins and FROM_THE_START.search(code):
            return False
        named = {f"w{len(self.sources) + n}": shape for n, shape in enumerate(weights)}
        step = Step(f"v{len(self.steps)}", code, (*operands, *named))
        made = {name: _zeros(shape) for name, shape in named.items()}
        both = [{**values, **made} for values in (self.batch, self.longer)]
        if any(execute(step, values, 0) is not None for values in both):
            return False
        batch, longer = (values[step.name] for values in both)
        features = [size for size, kind in zip(batch.shape[1:], _kinds(batch, longer), strict=True) if kind == "f"]
        if batch.ndim > MOST_DIMS or max(features, default=0) > MOST_FEATURES or longer.numel() > LARGEST:
            return False
        for name, shape in named.items():
            self._add_source(name, shape, "plain", True)
        self.steps.append(step)
        self.batch[step.name], self.longer[step.name] = batch, longer
        if joins or "torch.cat" in code:
            self.joined.add(step.name)
        return True


def _zeros(shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def _kinds(batch: Tensor, longer: Tensor) -> str:
    """For each dimension after the batch: r if samples differ in it, f for features."""
    return "".join("f" if a == b else "r" for a, b in zip(batch.shape[1:], longer.shape[1:], strict=True))


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


def _elements(value: Any, row: int | None, subject: Subject) -> tuple[Tensor, Tensor]:
    """The elements of a value, or of a sample in a batch, that are there, in order, and which of them are valid."""
    masked = subject.is_value(value)
    data, mask = subject.observe(value) if masked else (value, None)
    valid = torch.ones(data.shape, dtype=torch.bool) if mask is None else mask.expand(data.shape)
    if row is not None:
        there = subject.extent(value) if masked else None
        data, valid = data[row], valid[row]
        if there is not None:
            data, valid = data[there[row]], valid[there[row]]
    return data.flatten(), valid.flatten()


def _difference(value: Any, sample: Any, row: int, subject: Subject) -> str | None:
    got, valid = _elements(value, row, subject)
    want, wanted = _elements(sample, None, subject)
    if got.shape != want.shape:
        return f"{got.numel()} elements are there instead of {want.numel()}"
    if not torch.equal(valid, wanted):
        return f"{int(valid.sum())} elements are valid instead of {int(wanted.sum())}"
    return difference(got.detach(), want.detach(), wanted)


def _scalar(value: Any, row: int | None, subject: Subject) -> Tensor:
    """A number in which each element of a sample that is there and valid has its own weight."""
    data, valid = _elements(value, row, subject)
    weights = torch.linspace(0.5, 1.5, data.numel(), dtype=data.dtype)
    return torch.where(valid, data, 0).tanh().mul(weights).sum()


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
