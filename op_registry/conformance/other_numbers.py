"""The same call with other Python numbers: for what a rule keeps of one call, and must not answer another one with."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import Any

from torch import Tensor

from op_registry.conformance.randomness import start_random_numbers
from op_registry.conformance.sample import Sample
from op_registry.conformance.trees import tree_leaves, tree_map
from op_registry.conformance.watching import Recorder


def with_other_numbers(sample: Sample, seed: int = 0) -> Sample:
    """The sample with other numbers to compute with, as far as plain torch then gives results of the same shapes and
    dtypes; the sample itself where it does so for none."""
    places = _places_of_numbers(sample, seed)
    kinds = _kinds_of_results(sample, seed) if places else None
    for place in places if kinds is not None else ():
        changed = _with_other_number(sample, place)
        if _kinds_of_results(changed, seed) == kinds:
            sample = changed
    return sample


def _places_of_numbers(sample: Sample, seed: int) -> list[int]:
    """Which leaves of the arguments are numbers to compute with: fractions, and what an operator's schema calls one.

    Other integers and truth values are sizes and options, which torch does not check everywhere: batch norm without
    running statistics crashes where it is told not to be training.
    """
    leaves = tree_leaves((sample.args, sample.kwargs))
    numbers = _numbers_of_schemas(sample, seed) if any(isinstance(leaf, int) for leaf in leaves) else []
    return [
        place
        for place, leaf in enumerate(leaves)
        if isinstance(leaf, (float, complex))
        or any(type(leaf) is type(number) and leaf == number for number in numbers if isinstance(leaf, int))
    ]


def _numbers_of_schemas(sample: Sample, seed: int) -> list[Any]:
    """What the call gives to operators in the place of numbers."""
    recorder = Recorder()
    args, kwargs = _copied(sample)
    start_random_numbers(seed)
    with contextlib.suppress(Exception):  # where plain torch raises, no number is changed
        recorder.run(sample.fn, *args, **kwargs)
    found: list[Any] = []
    for op, given, named in recorder.calls:
        numeric = {a.name for a in op._schema.arguments if "number" in str(a.type)}
        values = {**dict(zip((a.name for a in op._schema.arguments), given, strict=False)), **named}
        found += tree_leaves([value for name, value in values.items() if name in numeric])
    return found


def _with_other_number(sample: Sample, place: int) -> Sample:
    """Half of a fraction, which may be a probability; the other truth value; one more than an integer."""
    position = itertools.count()

    def other(leaf: Any) -> Any:
        if next(position) != place:
            return leaf
        if isinstance(leaf, bool):
            return not leaf
        return leaf + 1 if isinstance(leaf, int) or not leaf else leaf / 2

    args, kwargs = tree_map(other, (sample.args, sample.kwargs))
    return dataclasses.replace(sample, args=args, kwargs=kwargs)


def _kinds_of_results(sample: Sample, seed: int) -> list[Any] | None:
    """Shapes and dtypes of what plain torch gives; None where it raises."""
    args, kwargs = _copied(sample)
    start_random_numbers(seed)
    try:
        results = tree_leaves(sample.fn(*args, **kwargs))
    except Exception:
        return None
    return [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in results]


def _copied(sample: Sample) -> tuple[Any, Any]:
    return sample.with_tensors(lambda tensor: tensor.detach().clone())
