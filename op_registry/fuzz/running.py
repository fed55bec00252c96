"""Runs a program on values of a subject, or on plain tensors, and keeps its values, gradients and errors."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.plain_torch import one_line, weighted_sum
from op_registry.conformance.randomness import start_random_numbers
from op_registry.conformance.subject import Observed, Subject
from op_registry.fuzz import idioms
from op_registry.fuzz.programs import Program, Step

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
    results = [*names, *(step.name for step in program.steps if not step.writes)]
    text = "\n".join([f"def program({', '.join(names)}):", *lines, f"    return ({', '.join(results)},)"])
    module: dict[str, Any] = dict(NAMES)
    exec(compile(text, "<a random program>", "exec"), module)
    function: Callable[..., tuple[Tensor, ...]] = module["program"]
    return function


def results_of(program: Program) -> list[str]:
    """The names of the values that :func:`as_function` returns."""
    return [s.name for s in program.sources] + [step.name for step in program.steps if not step.writes]
