"""A sample call and an operator that has some: what torch's database and a library's own operators have in common."""

from __future__ import annotations

import copy
import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from op_registry.conformance.randomness import start_random_numbers
from op_registry.conformance.trees import tree_leaves, tree_map


def _is_strided(leaf: object) -> TypeGuard[Tensor]:
    """Whether a leaf of the arguments is a tensor with values that a mask can hide."""
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.device.type != "meta"


@dataclass(frozen=True, eq=False)
class Sample:
    """One call: `fn(*args, **kwargs)`, and what may be asked of it beyond its values. Compared by identity."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    number: int
    dtype: torch.dtype
    # What to differentiate of the result (some results are only defined up to a gauge).
    differentiable_part: Callable[[Any], Any] = lambda result: result
    differentiable: bool = True
    twice_differentiable: bool = True
    # Calls that promise nothing about their values (empty_like, …): shape, dtype and mask are compared.
    valueless: bool = False
    # Which tensors to differentiate by, in the order of `tensors`; None is all that hold real or complex numbers.
    variables: frozenset[int] | None = None

    @functools.cached_property
    def tensors(self) -> list[Tensor]:
        """The distinct strided tensors among the arguments, in order."""
        found: dict[int, Tensor] = {}
        for leaf in tree_leaves((self.args, self.kwargs)):
            if _is_strided(leaf):
                found.setdefault(id(leaf), leaf)
        return list(found.values())

    def with_tensors(self, replacement: Callable[[Tensor], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with each distinct tensor replaced, one tensor passed twice staying one."""
        made: dict[int, Any] = {}

        def replace(leaf: object) -> Any:
            if not _is_strided(leaf):
                return leaf
            if id(leaf) not in made:
                made[id(leaf)] = replacement(leaf)
            return made[id(leaf)]

        args, kwargs = tree_map(replace, (self.args, self.kwargs))
        return args, kwargs

    def shape_of_call(self) -> tuple[Any, ...]:
        """What two calls share when one of them is enough: dimensions, dtypes, and which options are set how."""

        def describe(leaf: object) -> Any:
            if isinstance(leaf, Tensor):
                return (leaf.ndim, leaf.dtype, leaf.numel() == 0)
            return type(leaf).__name__ if isinstance(leaf, (int, float)) and not isinstance(leaf, bool) else str(leaf)

        return tuple(map(str, tree_leaves(tree_map(describe, (self.args, sorted(self.kwargs.items()))))))


class Operator:
    """An entry of the database, or an operator of the user's: a name, and samples by dtype."""

    name: str
    dtypes: frozenset[torch.dtype]
    # False where this is the operator in one dtype only, and what is asked once of an operator is asked in another.
    leading = True

    def in_dtype(self, dtype: torch.dtype) -> Operator:
        """The same operator in one of its dtypes."""
        part = copy.copy(self)
        part.dtypes = frozenset({dtype})
        part.leading = dtype is self.preferred_dtype
        return part

    def samples(self, dtype: torch.dtype) -> list[Sample]:
        """Every sample, in an order that does not change."""
        raise NotImplementedError

    def error_samples(self) -> list[Sample]:
        """Calls that plain torch refuses."""
        return []

    @property
    def preferred_dtype(self) -> torch.dtype:
        """float32 where the operator takes it."""
        for dtype in (torch.float32, torch.int64, torch.complex64, torch.bool):
            if dtype in self.dtypes:
                return dtype
        return min(self.dtypes, key=str)

    @property
    def gradient_dtype(self) -> torch.dtype | None:
        """float64 where the operator takes it and has a derivative."""
        return torch.float64 if torch.float64 in self.dtypes else None

    def __repr__(self) -> str:
        return f"<operator {self.name}>"


def chosen(samples: list[Sample], most: int | None) -> list[Sample]:
    """At most `most` samples, of as many different shapes of call as there are."""
    if most is None or len(samples) <= most:
        return samples
    groups: dict[Any, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.shape_of_call(), []).append(sample)
    rounds = itertools.zip_longest(*groups.values())
    picked = [s for r in rounds for s in r if s is not None]
    # Spread over the groups rather than their first ones: early samples are the plainest.
    firsts = len(groups)
    if firsts > most:
        picked = [picked[i * firsts // most] for i in range(most)]
    return sorted(picked[:most], key=lambda s: s.number)


def start_all_random_numbers(seed: int = 0) -> None:
    """Seed every generator that sample makers draw from: torch's, Python's, and NumPy's where it is installed."""
    start_random_numbers(seed)
    random.seed(seed)
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(seed)
