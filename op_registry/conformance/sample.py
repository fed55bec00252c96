"""Sample calls, and operators that have them: the interface of torch's database and of other libraries' operators."""

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
from torch.utils import _pytree


def _is_strided(leaf: object) -> TypeGuard[Tensor]:
    """Whether a leaf of the arguments is a tensor that can be masked."""
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.device.type != "meta"


@dataclass(frozen=True, eq=False)
class Sample:
    """One call: `fn(*args, **kwargs)`, and what is known about its derivatives. Compared by identity."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    number: int
    dtype: torch.dtype
    # Selects the part of the result to differentiate (some results are only defined up to a gauge).
    differentiable_part: Callable[[Any], Any] = lambda result: result
    differentiable: bool = True
    twice_differentiable: bool = True
    # Whether the values are unspecified (rand_like, …): only shape, dtype and mask are compared.
    valueless: bool = False
    # Which of `tensors` to differentiate with respect to; None means all real and complex ones.
    variables: frozenset[int] | None = None
    # Calls whose results are uninitialised memory (empty_like, …): nothing of them is valid, whatever the masks.
    uninitialised: bool = False
    # What its values are, if that makes it a kind of call of its own.
    values: str = ""

    @functools.cached_property
    def tensors(self) -> list[Tensor]:
        """The distinct strided tensors among the arguments, in order."""
        by_id: dict[int, Tensor] = {}
        for leaf in tree_leaves((self.args, self.kwargs)):
            if _is_strided(leaf):
                by_id.setdefault(id(leaf), leaf)
        return list(by_id.values())

    def with_tensors(self, replacement: Callable[[Tensor], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with each distinct tensor replaced; a tensor passed twice has one replacement."""
        replacements: dict[int, Any] = {}

        def replace(leaf: object) -> Any:
            if not _is_strided(leaf):
                return leaf
            if id(leaf) not in replacements:
                replacements[id(leaf)] = replacement(leaf)
            return replacements[id(leaf)]

        args, kwargs = tree_map(replace, (self.args, self.kwargs))
        return args, kwargs

    def copies(
        self, wanted: frozenset[int] = frozenset(), placed: Callable[[Tensor], Tensor] = lambda tensor: tensor
    ) -> tuple[Any, Any, list[Tensor]]:
        """Plain copies of the arguments, and of each tensor among them, `placed` on a device; those `wanted` require
        grad.
        """
        copies: list[Tensor] = []

        def copy(tensor: Tensor) -> Tensor:
            copies.append(placed(tensor.detach().clone()).requires_grad_(len(copies) in wanted))
            return copies[-1]

        args, kwargs = self.with_tensors(copy)
        return args, kwargs, copies

    def shape_of_call(self) -> tuple[Any, ...]:
        """A key that is equal for calls of the same kind: dimensions, dtypes, emptiness, options, kinds of values."""

        def describe(leaf: object) -> Any:
            if isinstance(leaf, Tensor):
                return (leaf.ndim, leaf.dtype, leaf.numel() == 0)
            return type(leaf).__name__ if isinstance(leaf, (int, float)) and not isinstance(leaf, bool) else str(leaf)

        described = tree_leaves(tree_map(describe, (self.args, sorted(self.kwargs.items()))))
        return (self.values, *map(str, described))


class Operator:
    """An entry of the database, or an operator of another library: a name, and samples for each dtype."""

    name: str
    dtypes: frozenset[torch.dtype]
    # Whether to run the trials that are run once per operator; False for `in_dtype` of all but the preferred dtype, and
    # for `with_part` of all but the first part.
    leading = True
    # Which of the samples of each dtype are tried.
    part = slice(0, None, 1)

    def in_dtype(self, dtype: torch.dtype) -> Operator:
        """The same operator in one of its dtypes."""
        part = copy.copy(self)
        part.dtypes = frozenset({dtype})
        part.leading = dtype is self.preferred_dtype
        return part

    def with_part(self, part: slice) -> Operator:
        """The same operator with every N-th of its samples on dense storage; the first part has those on the others."""
        piece = copy.copy(self)
        piece.part = part
        piece.leading = self.leading and part.start == 0
        return piece

    @property
    def divided(self) -> bool:
        """Whether other parts of the samples are left to others."""
        return self.part.step > 1

    def samples(self, dtype: torch.dtype) -> list[Sample]:
        """Every sample, always in the same order."""
        raise NotImplementedError

    def error_samples(self) -> list[Sample]:
        """Calls on which plain torch raises."""
        return []

    @property
    def preferred_dtype(self) -> torch.dtype:
        """float32 if the operator takes it; else int64, complex64, bool, or any other."""
        for dtype in (torch.float32, torch.int64, torch.complex64, torch.bool):
            if dtype in self.dtypes:
                return dtype
        return min(self.dtypes, key=str)

    @property
    def gradient_dtype(self) -> torch.dtype | None:
        """float64 if the operator takes it and has a derivative."""
        return torch.float64 if torch.float64 in self.dtypes else None

    def __repr__(self) -> str:
        return f"<operator {self.name}>"


def copied(leaf: object) -> Any:
    """A copy of a tensor, without its graph; other values as they are."""
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def chosen(samples: list[Sample], most: int | None) -> list[Sample]:
    """At most `most` samples, of as many kinds of call (`shape_of_call`) as possible."""
    if most is None or len(samples) <= most:
        return samples
    groups: dict[Any, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.shape_of_call(), []).append(sample)
    rounds = itertools.zip_longest(*groups.values())
    picked = [s for r in rounds for s in r if s is not None]
    # With too many groups, take groups evenly from the whole list: the first ones have the simplest samples.
    if len(groups) > most:
        picked = [picked[i * len(groups) // most] for i in range(most)]
    return sorted(picked[:most], key=lambda s: s.number)


def start_all_random_numbers(seed: int = 0) -> None:
    """Seed every generator that sample makers draw from: torch's, Python's, and NumPy's if it is installed."""
    start_random_numbers(seed)
    random.seed(seed)
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(seed)


# ------------------------------------ the leaves of nested arguments and results, and a copy with each of them replaced

# torch.utils._pytree does the same, but its lookup of each leaf's type took half the time of a conformance run. So it
# is used only for containers other than tuples, lists and dicts.


def tree_leaves(tree: object, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """Every leaf in `tree`, in order: whatever is not a container, or is accepted by `is_leaf`."""
    leaves: list[Any] = []
    _collect(tree, is_leaf, leaves)
    return leaves


def tensors_of(tree: object) -> list[Tensor]:
    """The tensors among the leaves."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _collect(tree: Any, is_leaf: Callable[[Any], bool] | None, leaves: list[Any]) -> None:
    kind = type(tree)
    if kind is Tensor or (is_leaf is not None and is_leaf(tree)):
        leaves.append(tree)
    elif kind is tuple or kind is list:
        for item in tree:
            _collect(item, is_leaf, leaves)
    elif kind is dict:
        for item in tree.values():
            _collect(item, is_leaf, leaves)
    elif _is_another_container(tree):
        leaves += _pytree.tree_leaves(tree, is_leaf)
    else:
        leaves.append(tree)


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """A copy of `tree` with each leaf replaced by `function` of it."""
    kind = type(tree)
    if kind is Tensor:
        return function(tree)
    if kind is tuple:
        return tuple([tree_map(function, item) for item in tree])
    if kind is list:
        return [tree_map(function, item) for item in tree]
    if kind is dict:
        return {key: tree_map(function, item) for key, item in tree.items()}
    return _pytree.tree_map(function, tree) if _is_another_container(tree) else function(tree)


def _is_another_container(tree: object) -> bool:
    """Whether it is a named tuple, one of torch's return types, or a registered pytree node."""
    return isinstance(tree, tuple) or type(tree) in _pytree.SUPPORTED_NODES


# -------------------------------------------------- seeding, so that every run of a trial draws the same random numbers


def start_random_numbers(seed: int) -> None:
    """`torch.manual_seed` without queueing a call for a later CUDA initialisation.

    Each queued call holds a formatted stack trace, which took a quarter of the time of a conformance run.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
