"""A random program from a seed: the same program for the same seed, rules and version of torch.

Steps are tried on plain tensors, so that most of them give a result.
"""

from __future__ import annotations

import math
import random
import re
import warnings
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from op_registry.conformance.subject import Subject
from op_registry.fuzz import programs
from op_registry.fuzz.programs import Program, Source, Step, execute
from op_registry.fuzz.steps import (
    GROUPS,
    WEIGHT_OF_OWN_CALLS,
    WEIGHT_OF_RULES,
    Call,
    calls_of_rules,
    endless,
    filled_in,
    left_open,
    misread,
    operand,
)

FEWEST_STEPS = 3
ATTEMPTS = 60
LARGEST = 400_000  # elements of a value
# Shapes beyond the sizes from which conversions, fills, sorts and sums over stored elements work in chunks
# (op_registry/sparse/compaction.py, coordinates.py, segments.py, op_registry/records/fill.py), and one for which
# distances do (op_registry/ops/contractions/distances.py).
LARGE = ((40, 4096), (3, 300, 200), (70_000, 2), (2, 70_000))
SHARE_OF_LARGE = 0.02
MEDIUM = ((200, 64),)
SHARE_OF_MEDIUM = 0.01
# Calls that take minutes on large and medium shapes, because their result or work is quadratic in a size.
QUADRATIC = re.compile(
    "dist|split|chunk|unbind|kron|outer|diag|cov|corr|@|matmul|linear|dot|mm|einsum|attention|unfold"
    r"|index_select|index_add|index_put|index_fill|embedding|take\(|put_|\[\{1\}\]|\{1\}\]|conv"
)
# Calls whose backward reads an operand even if it was overwritten since; torch's other operators raise.
UNNOTICED = re.compile("kron")
# Views of another dtype, returned by a graph: torch makes a subclass's views anew with as_strided, in the base's dtype.
MADE_ANEW = re.compile(r"view\.dtype")
# Calls whose gradient is intentionally not their slope.
UNSLOPED = re.compile(r"detach|\.data\b|float16|to\(torch.int")
QUADRATIC_ON_MEDIUM = re.compile("kron")


@dataclass(frozen=True)
class Choices:
    """What programs may contain.

    most_steps  the longest program
    writes      how much more often than elsewhere steps write to their operand
    random      whether steps may draw random numbers
    storages    the storages of their tensors other than dense
    own_calls   calls of the subject that torch does not have, each with the code for plain tensors
    left_out    calls that the law cannot judge
    copies      whether steps work on copies of tensors in other storages than dense (a graph may not write to these)
    dtypes      of the sources; the first two have the first one
    finite      whether there are no infinities and NaNs among the valid data
    """

    most_steps: int = 12
    writes: float = 1.0
    random: bool = True
    storages: tuple[str, ...] = ()
    own_calls: tuple[tuple[str, str], ...] = ()
    left_out: re.Pattern[str] | None = None
    copies: bool = False
    dtypes: tuple[str, ...] = ("float32", "float64", "int64", "int64", "bool", "float16")
    finite: bool = False

    @staticmethod
    def for_law(law: str, subject: Subject, most_steps: int = 12) -> Choices:
        """The programs for a law: any for P3, with derivatives for P5, dense for P1 and P6 (whose views alias)."""
        everything = Choices(most_steps, 1.0, True, subject.storages, subject.own_calls)
        if law == "P3":
            return everything
        if law == "P5":
            return replace(
                everything, random=False, left_out=UNSLOPED, dtypes=("float64", "int64", "bool"), finite=True
            )
        if law == "P7":
            return Choices(most_steps, 1.0, False, subject.storages, subject.own_calls, MADE_ANEW, copies=True)
        return Choices(most_steps, 3.0 if law == "P6" else 1.0, left_out=UNNOTICED if law == "P1" else None)


def program_from(seed: int, choices: Choices) -> Program:
    """The program of a seed."""
    rng = random.Random(seed)
    sources = _sources(rng, choices)
    state = _State(sources, choices, rng)
    for _ in range(rng.randint(min(FEWEST_STEPS, choices.most_steps), choices.most_steps)):
        state.add_step(seed)
    return Program(seed, sources, tuple(state.steps))


def _sources(rng: random.Random, choices: Choices) -> tuple[Source, ...]:
    base = _base_shape(rng)
    storages = choices.storages if choices.storages and rng.random() < 0.5 else ()
    found: list[Source] = []
    for number in range(rng.randint(2, 4)):
        shape = base if number == 0 or rng.random() < 0.6 else _related(base, rng)
        dtype = choices.dtypes[0] if number < 2 else rng.choice(choices.dtypes)
        mask = rng.choice([m for m in programs.MASKS if number or m != "plain"])
        alike = [s.name for s in found if s.shape == shape and s.mask not in ("plain", "unstored")]
        found.append(
            Source(
                name=f"x{number}",
                shape=shape,
                dtype=dtype,
                seed=rng.randrange(1 << 30) | choices.finite,  # multiples of ten have an infinity or a NaN
                mask=mask,
                under=rng.choice(alike) if alike and mask != "plain" and rng.random() < 0.3 else None,
                storage=rng.choice(storages) if storages and rng.random() < 0.7 and mask != "plain" else "dense",
                requires_grad=dtype.startswith("float") and rng.random() < 0.5,
            )
        )
    return tuple(found)


def _base_shape(rng: random.Random) -> tuple[int, ...]:
    size = rng.random()
    if size < SHARE_OF_LARGE:
        return rng.choice(LARGE)
    if size < SHARE_OF_LARGE + SHARE_OF_MEDIUM:
        return rng.choice(MEDIUM)
    return tuple(rng.choice((2, 3, 4, 5, 6, 8)) for _ in range(rng.randint(1, 3)))


def _related(base: tuple[int, ...], rng: random.Random) -> tuple[int, ...]:
    """A shape that fits `base`: its transpose, a shape that broadcasts to it, or one of its rows."""
    choices = [
        base[1:],
        (*base[:-1], 1),
        (1, *base[1:]),
        base[::-1],
        base[-1:],
        base[:1],
        (0, *base[1:]),
        (base[-1], base[-1]),
    ]
    return rng.choice(choices if len(base) > 1 and max(base) < 100 else [base, base[-1:]])


class _State:
    """A program under construction, and its values in plain torch."""

    def __init__(self, sources: tuple[Source, ...], choices: Choices, rng: random.Random) -> None:
        self.choices, self.rng = choices, rng
        elements = max(math.prod(source.shape) for source in sources)
        self.too_slow = QUADRATIC if elements > 10**5 else QUADRATIC_ON_MEDIUM if elements > 10**4 else None
        self.values: dict[str, Tensor] = {n: v for n, v in programs.plain(sources).items() if isinstance(v, Tensor)}
        self.steps: list[Step] = []
        for source in sources:
            may_write = not (source.requires_grad or (choices.copies and source.storage != "dense"))
            if not may_write and rng.random() < 0.6:  # no step may write to a leaf itself
                self._accept(Step(f"v{len(self.steps)}", "{0}.clone()", (source.name,)), 0)

    def add_step(self, seed: int) -> None:
        """Add a step that plain torch runs, unless none is found."""
        for _ in range(ATTEMPTS):
            step = self._drawn()
            if step is not None and self._accept(step, seed):
                return

    def _drawn(self) -> Step | None:
        call = self._call()
        operands: list[str] = []
        for kind in call.kinds:
            like = self.values[operands[0]] if operands else None
            name = operand(kind, self.values, like, self.rng)
            if name is None:
                return None
            operands.append(name)
        code = filled_in(call.code, self.values[operands[0]], self.rng)
        return Step(f"v{len(self.steps)}", code, tuple(operands), call.plain, call.writes, random=call.random)

    def _call(self) -> Call:
        groups = [(w * self.choices.writes if calls[0].writes else w, calls) for w, calls in GROUPS]
        groups.append((WEIGHT_OF_RULES, calls_of_rules()))
        if self.choices.own_calls:
            own = [Call(code, "aa"[: 1 + ("{1}" in code)], plain=plain) for code, plain in self.choices.own_calls]
            groups.append((WEIGHT_OF_OWN_CALLS, tuple(own)))
        (calls,) = self.rng.choices([calls for _, calls in groups], [weight for weight, _ in groups])
        call = self.rng.choice(calls)
        unwanted = (call.random and not self.choices.random) or any(
            pattern.search(call.code) for pattern in (self.too_slow, self.choices.left_out) if pattern is not None
        )
        return self._call() if unwanted else call

    def _accept(self, step: Step, seed: int) -> bool:
        """Run a step on plain tensors; keep it if its result has a reasonable size and torch specifies it."""
        reads_wrongly, writes_openly = misread(step, self.values), step.writes and left_open(step, self.values)
        if reads_wrongly or writes_openly or endless(step, self.values):
            return False
        values: dict[str, object] = dict(self.values)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if execute(step, values, seed, plain=True) is not None:
                return False
        if not step.writes:
            value = values[step.name]
            if not isinstance(value, Tensor) or value.layout is not torch.strided or value.numel() > LARGEST:
                return False
            of = self.values[step.operands[0]]
            view = value.numel() > 0 and value.untyped_storage().data_ptr() == of.untyped_storage().data_ptr()
            step = Step(step.name, step.code, step.operands, step.plain, False, view and value is not of, step.random)
            self.values[step.name] = value
        self.steps.append(step)
        return True
