"""The same call with other Python numbers, to catch rules that cache a result of one call and reuse it for another."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from torch import Tensor

from op_registry.conformance.randomness import start_random_numbers
from op_registry.conformance.sample import Sample
from op_registry.conformance.trees import tree_leaves, tree_map
from op_registry.conformance.watching import Recorder


def with_other_numbers(sample: Sample, seed: int = 0) -> Sample:
    """The sample with every number changed for which plain torch's results keep their shapes and dtypes.

    The sample itself if there is no such number.
    """
    positions = _positions_of_numbers(sample, seed)
    kinds = _kinds_of_results(sample, seed) if positions else None
    for position in positions if kinds is not None else ():
        changed = _with_other_number(sample, position)
        if _kinds_of_results(changed, seed) == kinds:
            sample = changed
    return sample


def _positions_of_numbers(sample: Sample, seed: int) -> list[int]:
    """Which leaves of the arguments are operands: floats, and values of arguments whose schema type is a number.

    Other ints and bools are sizes and options, and torch doesn't validate all of these: batch norm without running
    statistics crashes with training=False.
    """
    leaves = tree_leaves((sample.args, sample.kwargs))
    numbers = _numbers_of_schemas(sample, seed) if any(isinstance(leaf, int) for leaf in leaves) else []
    return [
        position
        for position, leaf in enumerate(leaves)
        if isinstance(leaf, (float, complex))
        or any(type(leaf) is type(number) and leaf == number for number in numbers if isinstance(leaf, int))
    ]


def _numbers_of_schemas(sample: Sample, seed: int) -> list[Any]:
    """The values that the call passes to operators for arguments whose schema type is a number."""
    args, kwargs, _ = sample.copies()
    start_random_numbers(seed)
    numbers: list[Any] = []
    for op, op_args, op_kwargs in Recorder().recorded(sample.fn, *args, **kwargs):
        numeric = {a.name for a in op._schema.arguments if "number" in str(a.type)}
        values = {**dict(zip((a.name for a in op._schema.arguments), op_args, strict=False)), **op_kwargs}
        numbers += tree_leaves([value for name, value in values.items() if name in numeric])
    return numbers


def _with_other_number(sample: Sample, position: int) -> Sample:
    """The sample with one leaf changed: a float is halved (it may be a probability), a bool negated, an int plus 1."""
    leaf_positions = itertools.count()

    def other(leaf: object) -> Any:
        if next(leaf_positions) != position or not isinstance(leaf, (int, float, complex)):
            return leaf
        if isinstance(leaf, bool):
            return not leaf
        return leaf + 1 if isinstance(leaf, int) or not leaf else leaf / 2

    args, kwargs = tree_map(other, (sample.args, sample.kwargs))
    return dataclasses.replace(sample, args=args, kwargs=kwargs)


def _kinds_of_results(sample: Sample, seed: int) -> list[Any] | None:
    """The shapes and dtypes of plain torch's results; None if it raises."""
    args, kwargs, _ = sample.copies()
    start_random_numbers(seed)
    try:
        results = tree_leaves(sample.fn(*args, **kwargs))
    except Exception:
        return None
    return [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in results]
