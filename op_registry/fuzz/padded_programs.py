"""Programs under P9, drawn from a seed: ragged sources, and lines that are the same for a batch and for a sample."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from op_registry.fuzz import padded_steps, ragged
from op_registry.fuzz.programs import Program, Source, Step
from op_registry.fuzz.running import execute

# Letters are dimensions in which samples differ, numbers are features.
AXES: tuple[tuple[str | int, ...], ...] = (
    ("B", "T", 4), ("B", "T", 4), ("B", "S", 4), ("B", 3, "T"), ("B", 2, "H", "W"), ("B", 4), ("B", "T", 2),
    ("B", "T", 1),
)  # fmt: skip
LONGEST = 6
MOST_SAMPLES = 4
# Lengths along each axis that no sample has, each of them another.
LONGER = {"T": 13, "H": 11, "W": 17, "S": 19}
ATTEMPTS = 200
MOST_DIMS = 5
MOST_FEATURES = 16
LARGEST = 50_000  # elements of a value of longer samples
# Lines that join what may differ from sample to sample: along a dimension after the batch, or a step before others.
JOINS = re.compile(r"torch\.cat\(.*, \d\)|\*.*unbind\(1\)\]")
# Cuts that a join may not go before: one that happens to be at the join's border gives a part back, which is not what a
# cut of the sample's own positions gives; cuts at the end by a number that may be the width of a part.
FROM_THE_START = re.compile(r" (\d:|:\d|::2)|split\(2")
FROM_THE_END = re.compile(r":-\d")
LARGEST_CUT = 3
# Lines whose results may have gaps within a sample, beside joins.
MERGES = re.compile(r"flatten\(|view\(")
# Lines that are not drawn where a dimension in which samples differ has one position: which of several dimensions of
# size 1 are merged, and whether a loop of one step has stacked its state or kept it, cannot be told.
ONE = re.compile(r"idioms\.|flatten\(|view\(")


def program_of_samples(seed: int, most_steps: int) -> Program:
    """The program of a seed."""
    state = _State(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state.draw_sources()
        for _ in range(state.rng.randint(3, most_steps)):
            state.draw_step()
    return Program(seed, tuple(state.sources), tuple(state.steps))


def can_be_drawn(program: Program) -> bool:
    """Whether every line fits its operands: in a program made smaller, some may count something else."""
    state = _State(program.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for source in program.sources:
            state.add_source(source)
        return all(state.fits(step) and state.add_step(step) for step in program.steps)


class _State:
    """A program under construction.

    batch, longer  its values in plain torch, in the sizes of the batch and of longer samples: dimensions whose sizes
                   differ are those in which samples do
    joined         the values that contain a join, and the smallest width of its parts
    gaps           the values whose samples may have gaps
    """

    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.sources: list[Source] = []
        self.steps: list[Step] = []
        self.batch: dict[str, Tensor] = {}
        self.longer: dict[str, Tensor] = {}
        self.joined: dict[str, int] = {}
        self.gaps: set[str] = set()

    @property
    def counted(self) -> str:
        """What lines may count in the batch, see padded_steps.drawn."""
        right = all(ragged.side_of(source, self.seed) == "right" for source in self.sources if source.axes)
        return "^~" if right else "~"

    def draw_sources(self) -> None:
        sizes = {axis: self.rng.randint(1, LONGEST) for axis in LONGER}
        sizes["B"] = self.rng.randint(1, MOST_SAMPLES)
        mask = self.rng.choice(("random", "plain"))
        for n in range(self.rng.randint(2, 4)):
            axes = self.rng.choice(AXES)
            shape = tuple(a if isinstance(a, int) else sizes[a] for a in axes)
            self.add_source(self._source(f"x{n}", shape, mask, self.rng.random() < 0.7, axes))

    def _source(
        self, name: str, shape: tuple[int, ...], mask: str, requires_grad: bool, axes: tuple[str | int, ...] = ()
    ) -> Source:
        seed = self.rng.randrange(1 << 30) | 1
        return Source(name, shape, "float64", seed, mask, requires_grad=requires_grad, axes=axes)

    def add_source(self, source: Source) -> None:
        """Add a source and, if it is a batch, its values in both sizes."""
        self.sources.append(source)
        if source.axes:
            sizes = zip(source.axes, source.shape, strict=True)
            self.batch[source.name] = _zeros(source.shape)
            self.longer[source.name] = _zeros(tuple(LONGER.get(str(axis), size) for axis, size in sizes))

    def draw_step(self) -> None:
        """Add a line that torch runs in both sizes, unless none is found."""
        names = list(self.batch)
        for _ in range(ATTEMPTS):
            operands = [names[-1] if self.rng.random() < 0.6 else self.rng.choice(names)]  # chains find more
            if self.rng.random() < 0.25:
                operands.append(self.rng.choice(names))
            line = padded_steps.drawn(
                self._kinds(operands), self.batch[operands[0]].shape, self._countable(operands), self.rng
            )
            if line is None:
                continue
            weights = [
                self._source(f"w{len(self.sources) + n}", shape, "plain", True) for n, shape in enumerate(line.weights)
            ]
            self.sources += weights
            step = Step(f"v{len(self.steps)}", line.code, (*operands, *(w.name for w in weights)), kind=line.kind)
            if self.add_step(step):
                return
            del self.sources[len(self.sources) - len(weights) :]

    def fits(self, step: Step) -> bool:
        """Whether the table has a step's line for its operands."""
        operands = [name for name in step.operands if name in self.batch]
        return padded_steps.fits(step.kind, self._kinds(operands), self._countable(operands))

    def _kinds(self, operands: Sequence[str]) -> list[str]:
        return [_kinds(self.batch[name], self.longer[name]) for name in operands]

    def _countable(self, operands: Sequence[str]) -> str:
        return self.counted if self.gaps.isdisjoint(operands) else ""

    def add_step(self, step: Step) -> bool:
        """Run a line in both sizes; keep it if its result has a reasonable size."""
        operands = [name for name in step.operands if name in self.batch]
        width = min((self.joined[name] for name in operands if name in self.joined), default=None)
        if width is not None and (
            FROM_THE_START.search(step.code) or (width <= LARGEST_CUT and FROM_THE_END.search(step.code))
        ):
            return False
        if ONE.search(step.code) and any(self._has_one(name) for name in operands):
            return False
        made = {source.name: _zeros(source.shape) for source in self.sources if not source.axes}
        both = [{**values, **made} for values in (self.batch, self.longer)]
        if any(execute(step, values, 0) is not None for values in both):
            return False
        batch, longer = (values[step.name] for values in both)
        features = [size for size, kind in zip(batch.shape[1:], _kinds(batch, longer), strict=True) if kind == "f"]
        if batch.ndim > MOST_DIMS or max(features, default=0) > MOST_FEATURES or longer.numel() > LARGEST:
            return False
        self.steps.append(step)
        if width is not None or JOINS.search(step.code):
            self.joined[step.name] = min([*(s for name in operands for s in self.batch[name].shape[1:]), width or 99])
        if step.name in self.joined or MERGES.search(step.code) or not self.gaps.isdisjoint(operands):
            self.gaps.add(step.name)
        self.batch[step.name], self.longer[step.name] = batch, longer
        return True

    def _has_one(self, name: str) -> bool:
        """Whether a value has at most one position along a dimension in which samples differ."""
        kinds = _kinds(self.batch[name], self.longer[name])
        return any(kind == "r" and size < 2 for kind, size in zip(kinds, self.batch[name].shape[1:], strict=True))


def _zeros(shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def _kinds(batch: Tensor, longer: Tensor) -> str:
    """For each dimension after the batch: r if samples differ in it, f for features."""
    return "".join("f" if a == b else "r" for a, b in zip(batch.shape[1:], longer.shape[1:], strict=True))
