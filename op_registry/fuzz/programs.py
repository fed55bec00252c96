"""A random program: the tensors that it starts from, its steps, and what it gives when it runs.

A program is a value: sources, and steps that are lines of Python. It runs on values of a subject, or on plain tensors.
"""

from __future__ import annotations

import functools
import re
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.masks import FILLS, refilled
from op_registry.conformance.plain_torch import one_line, weighted_sum
from op_registry.conformance.sample import start_random_numbers
from op_registry.conformance.subject import Observed, Subject
from op_registry.fuzz import idioms


@dataclass(frozen=True)
class Source:
    """A tensor that a program starts from.

    name           its variable
    shape, dtype   of the tensor; `dtype` is an attribute of torch
    seed           of its data and of its mask
    mask           the kind of mask (:data:`op_registry.fuzz.programs.MASKS`)
    under          the source whose mask tensor it is given, instead of one of its own
    storage        "dense", or a storage of the subject
    requires_grad  whether it is a leaf that requires grad
    axes           of a padded batch (P9): what its dimensions are (:mod:`op_registry.fuzz.padding`)
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    seed: int
    mask: str
    under: str | None = None
    storage: str = "dense"
    requires_grad: bool = False
    axes: tuple[str | int, ...] = ()


@dataclass(frozen=True)
class Step:
    """A line of a program.

    name      the variable that it assigns; a step that only writes gets a name, for messages, but assigns nothing
    code      a Python expression or statement, with {0}, {1} … for its operands
    plain     the code for plain tensors if it differs (a conversion to another storage)
    operands  the variables that it reads
    writes    whether it writes to its first operand and assigns no variable
    view      whether its value shares memory with its first operand in plain torch
    random    whether it draws random numbers
    kind      the line of a table that it was drawn from (P9)
    """

    name: str
    code: str
    operands: tuple[str, ...]
    plain: str | None = None
    writes: bool = False
    view: bool = False
    random: bool = False
    kind: str = ""

    def line(self, plain: bool = False) -> str:
        """The line of Python."""
        code = self.expression(plain)
        return code if self.writes else f"{self.name} = {code}"

    def expression(self, plain: bool = False) -> str:
        """Its code with the variables in place of {0}, {1} …"""
        code = self.plain if plain and self.plain is not None else self.code
        return re.sub(r"\{(\d)\}", lambda found: self.operands[int(found[1])], code)


@dataclass(frozen=True)
class Program:
    """Sources and steps; `seed` generated the program, and seeds the random numbers of each step."""

    seed: int
    sources: tuple[Source, ...]
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        lines = [
            f"{s.name}: {s.dtype}{list(s.shape)}, mask {s.mask}{f' of {s.under}' if s.under else ''}, {s.storage}"
            f"{', requires grad' if s.requires_grad else ''}"
            for s in self.sources
        ]
        return "\n".join([*lines, *(step.line() for step in self.steps)])


# -------------------------------------------------------------------- its tensors: data, masks, garbage under the masks

# The kinds of masks. "plain" stays a plain tensor; "unstored" is masked, with every element valid.
MASKS = {
    "plain": "a plain tensor",
    "unstored": "masked, all valid, no validity stored",
    "all": "a stored mask that is all True",
    "random": "a random mask",
    "rare": "a random mask with one element in eight valid",
    "rows": "a mask of size 1 in all dimensions but the first",
    "columns": "a mask of size 1 in all dimensions but the last",
    "lengths": "the first few elements of each row",
    "empty": "nothing valid",
    "permuted": "a random mask whose strides are in reverse order",
}


def data_of(source: Source) -> Tensor:
    """The valid data of a source: small numbers with ties and zeros, and sometimes an infinity or a NaN."""
    generator = torch.Generator().manual_seed(source.seed)
    dtype = getattr(torch, source.dtype)
    if dtype is torch.bool:
        return torch.rand(source.shape, generator=generator) < 0.5
    if not dtype.is_floating_point and not dtype.is_complex:
        # Indices into any dimension of two or more elements.
        return torch.randint(0, 2, source.shape, generator=generator).to(dtype)
    data = torch.randn(source.shape, generator=generator)
    if source.seed % 3 == 0:
        data = (data * 2).round() / 2
    if source.seed % 10 == 0 and data.numel():
        data.view(-1)[-1] = float("nan") if source.seed % 20 else float("inf")
    return data.to(dtype, copy=True)  # at version 0, which errors name


def mask_of(source: Source) -> Tensor | None:
    """The mask with which to wrap the source; None if it has no stored mask, or stays plain."""
    generator = torch.Generator().manual_seed(source.seed + 1)
    shape, dims = source.shape, len(source.shape)
    if source.mask in ("plain", "unstored"):
        return None
    if source.mask in ("all", "empty"):
        return torch.full(shape, source.mask == "all")
    if source.mask == "lengths" and dims >= 2:
        lengths = torch.randint(0, shape[1] + 1, shape[:1], generator=generator)
        mask = torch.arange(shape[1]) < lengths[:, None]
        return mask.reshape(*mask.shape, *[1] * (dims - 2))
    if source.mask == "rows" and dims:
        return torch.rand((shape[0], *[1] * (dims - 1)), generator=generator) < 0.6
    if source.mask == "columns" and dims:
        return torch.rand((*[1] * (dims - 1), shape[-1]), generator=generator) < 0.6
    if source.mask == "permuted" and dims >= 2:
        mask = torch.rand(tuple(reversed(shape)), generator=generator) < 0.6
        return mask.permute(*reversed(range(dims)))
    return torch.rand(shape, generator=generator) < (0.125 if source.mask == "rare" else 0.6)


def with_garbage(data: Tensor, mask: Tensor | None, seed: int) -> Tensor:
    """A copy of `data` with garbage wherever `mask` is False: of one kind for odd seeds, mixed for even ones."""
    if mask is None:
        return data.clone()
    full = mask.expand(data.shape)
    if seed % 2:
        return refilled(data, full, FILLS[seed // 2 % len(FILLS)])
    kind = torch.randint(len(FILLS), data.shape, generator=torch.Generator().manual_seed(seed))
    for number, fill in enumerate(FILLS):
        data = refilled(data, full | (kind != number), fill)
    return data


def wrapped(
    sources: Sequence[Source], subject: Subject, garbage: int | None, data: Mapping[str, Tensor] | None = None
) -> dict[str, object]:
    """The sources as values of the subject, with the data as they are (or `data`) or with garbage under the masks."""
    values: dict[str, object] = {}
    masks: dict[str, Tensor | None] = {}
    for source in sources:
        numbers = data_of(source) if data is None else data[source.name].clone()
        under = None if source.mask == "plain" else source.under
        mask = masks[source.name] = masks[under] if under is not None and under in masks else mask_of(source)
        if garbage is not None:
            numbers = with_garbage(numbers, mask, source.seed + garbage)
        if source.mask == "plain":
            values[source.name] = numbers.requires_grad_(source.requires_grad)
            continue
        value = subject.wrap(numbers, mask, requires_grad=source.requires_grad)
        if source.storage != "dense":
            value = subject.stored(value, source.storage, source.requires_grad, explicit_invalid=True)
        values[source.name] = value
    return values


def plain(sources: Sequence[Source]) -> dict[str, object]:
    """The sources as plain tensors, every element valid."""
    return {source.name: data_of(source).requires_grad_(source.requires_grad) for source in sources}


# ---------------------------------------------------------------------------------- a run: values, gradients and errors

# The names that a step's code may use besides its operands.
NAMES = {"torch": torch, "F": torch.nn.functional, "idioms": idioms, "nan": float("nan")}


@dataclass
class Outcome:
    """The outcome of a program: data and mask of its final values, its gradients, and the errors of its steps."""

    values: dict[str, Observed] = field(default_factory=dict)
    gradients: dict[str, Observed | None] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    # The values themselves.
    held: dict[str, Any] = field(default_factory=dict)


@functools.lru_cache(maxsize=4096)
def _compiled(code: str, writes: bool) -> types.CodeType:
    return compile(code, "<a step of a random program>", "exec" if writes else "eval")


def execute(step: Step, values: dict[str, Any], seed: int, plain: bool = False) -> Exception | None:
    """Run a step on `values`, and add its result to them; returns the exception that it raised, or None."""
    start_random_numbers(seed)
    try:
        result = eval(_compiled(step.expression(plain), step.writes), {**NAMES, **values})
    except Exception as error:
        return error.with_traceback(None)
    if not step.writes:
        values[step.name] = result
    return None


def run(
    program: Program, sources: Mapping[str, Any], subject: Subject, plain: bool = False, gradients: bool = True
) -> Outcome:
    """Run every step whose operands exist; a step that raises doesn't define its variable."""
    held = dict(sources)
    outcome = Outcome(held=held)
    wanted = {name: value for name, value in sources.items() if subject.requires_grad(value)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in program.steps:
            if all(name in held for name in step.operands):
                error = execute(step, held, program.seed, plain)
                if error is not None:
                    outcome.errors[step.name] = one_line(error)
        for name, value in held.items():
            _observe(name, value, outcome, subject)
        if gradients:
            _differentiate(outcome, wanted, subject)
    return outcome


def _observe(name: str, value: Any, outcome: Outcome, subject: Subject) -> None:
    """Add data and mask of a tensor to the outcome; torch refuses to read one of several views of a written base."""
    if not subject.is_value(value):
        return
    try:
        outcome.values[name] = observed(value, subject)
    except RuntimeError as error:
        outcome.errors[f"reading {name}"] = one_line(error)


def observed(value: Any, subject: Subject) -> Observed:
    """Data and mask; the data of a plain tensor that a step stored sparsely, densely."""
    data, mask = subject.observe(value)
    return (data if data.layout is torch.strided else data.to_dense()), mask


def _differentiate(outcome: Outcome, wanted: Mapping[str, Any], subject: Subject) -> None:
    """The gradients of a fixed weighting of all values with respect to the leaves `wanted`."""
    if not wanted:
        return
    try:
        scalar = weighted_sum(list(outcome.values.values()))
        if scalar is not None:
            outcome.gradients = gradients_of(scalar, wanted, subject)
    except Exception as error:
        outcome.errors["backward"] = one_line(error)


def gradients_of(scalar: Tensor, wanted: Mapping[str, Any], subject: Subject) -> dict[str, Observed | None]:
    """The gradients of a number with respect to the leaves `wanted`."""
    gradients = subject.gradients(scalar, list(wanted.values()))
    return {
        name: None if gradient is None else observed(gradient, subject)
        for name, gradient in zip(wanted, gradients, strict=True)
    }


def as_function(program: Program) -> Callable[..., tuple[Tensor, ...]]:
    """The program as a Python function of its sources that returns all their values, for torch.compile."""
    names = [source.name for source in program.sources]
    lines = [f"    {step.line()}" for step in program.steps]
    text = "\n".join([f"def program({', '.join(names)}):", *lines, f"    return ({', '.join(results_of(program))},)"])
    module: dict[str, Any] = dict(NAMES)
    exec(compile(text, "<a random program>", "exec"), module)
    function: Callable[..., tuple[Tensor, ...]] = module["program"]
    return function


def results_of(program: Program) -> list[str]:
    """The names of the values that :func:`as_function` returns."""
    return [s.name for s in program.sources] + [step.name for step in program.steps if not step.writes]
