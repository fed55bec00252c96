"""How a rule is mutated: the calls that a mutation changes, and decorators for kinds of mutations.

A way (of being wrong) gets a :class:`Call` of a rule, runs the right rule, and changes its result or its operands. It
records whether it changed anything observable (``call.changed``): a way that never does does not fit the rule.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.conformance.trees import tree_leaves, tree_map
from op_registry.dimensions.labels import Dimensions, Labels, tensors_in
from op_registry.records.dense import Dense
from op_registry.records.tracing import being_traced
from op_registry.rule import Run
from op_registry.sparse.permuted import Permuted
from op_registry.sparse.record import Sparse

# The dtypes in which data under a mask can be NaN.
NUMBERS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


@dataclass
class Call:
    """One call of a right rule."""

    run: Run
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    # What the way stores from one call to the next.
    memory: dict[Any, Any]
    changed: bool = False

    def result(self) -> Any:
        return self.run(*self.args, **self.kwargs)

    def records(self) -> list[Dense]:
        """Every dense record among the arguments, and the values of every sparse record."""
        leaves = (_values(leaf) for leaf in tree_leaves((self.args, self.kwargs)))
        return [leaf for leaf in leaves if isinstance(leaf, Dense)]

    def partial(self) -> list[Dense]:
        """The records with invalid elements; none while tracing, when masks have no values."""
        return [r for r in self.records() if some_invalid(r)]

    def with_records(self, change: Callable[[Dense, int], Dense]) -> Any:
        """The right rule's result with every record replaced by `change(record, number)`, numbered as in `records`."""
        number = itertools.count()

        def changed(leaf: object) -> Any:
            if isinstance(leaf, Permuted):
                return leaf.like(changed(leaf.base))
            if isinstance(leaf, Sparse):
                return leaf.like(change(leaf.values, next(number)))
            return change(leaf, next(number)) if isinstance(leaf, Dense) else leaf

        args, kwargs = tree_map(changed, (self.args, self.kwargs))
        return self.run(*args, **kwargs)


def _values(leaf: object) -> object:
    if isinstance(leaf, Permuted):
        return leaf.base.values
    return leaf.values if isinstance(leaf, Sparse) else leaf


def some_invalid(record: Dense) -> bool:
    valid = record.valid
    return valid is not None and not being_traced(valid) and record.data.numel() > 0 and not bool(valid.all())


def some_valid(record: Dense) -> bool:
    valid = record.valid
    return record.data.numel() > 0 and (valid is None or being_traced(valid) or bool(valid.any()))


def hidden(records: Sequence[Dense]) -> Tensor:
    """A number that depends on all data under the masks, and on nothing else."""
    parts = []
    for r in records:
        assert r.valid is not None
        parts.append(torch.where(r.valid, torch.zeros((), dtype=r.dtype), r.data).sum().real.to(torch.float64))
    return torch.stack(parts).sum()


# The wrong labels of a call, given its right ones and its tensors by name; None if the way does not fit the call.
Restate = Callable[[Labels, Mapping[str, Any]], Labels | None]


@dataclass(frozen=True)
class Way:
    """A way of being wrong, by name; `laws` are tried first, because they are expected to notice it.

    restate  what a wrong statement of dimensions says; the rule's run is then right, and "dims" is the only law
    """

    name: str
    change: Callable[[Call], Any] = field(repr=False)
    laws: tuple[str, ...] = ()
    restate: Restate | None = field(default=None, repr=False)

    def mutated(self, run: Run, changes: Changes) -> Run:
        """`run`, made wrong in this way; `changes` counts its calls, and those in which it changed something."""
        memory: dict[Any, Any] = {}

        def mutant(*args: Any, **kwargs: Any) -> Any:
            call = Call(run, args, kwargs, memory)
            changes.calls += 1
            try:
                return self.change(call)
            finally:
                changes.changed += call.changed

        return mutant


@dataclass
class Changes:
    """How often a mutant ran, and how often it changed something observable."""

    calls: int = 0
    changed: int = 0


@dataclass(frozen=True)
class Restated(Dimensions):
    """A statement made wrong; `changes` counts the calls whose labels are wrong."""

    right: Dimensions
    restate: Restate
    changes: Changes = field(repr=False, hash=False, compare=False)

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> Labels | None:
        right = self.right.labels(op, named)
        wrong = None if right is None else self.restate(right, tensors_in(op, named))
        self.changes.calls += 1
        self.changes.changed += wrong is not None
        return right if wrong is None else wrong

    def __str__(self) -> str:
        return f"made wrong: {self.right}"


WAYS: dict[str, Way] = {}


def way(name: str, *laws: str) -> Callable[[Callable[[Call], Any]], Callable[[Call], Any]]:
    """Decorator: registers a way of being wrong."""

    def register(change: Callable[[Call], Any]) -> Callable[[Call], Any]:
        WAYS[name] = Way(name, change, laws)
        return change

    return register


def restating(name: str) -> Callable[[Restate], Restate]:
    """Decorator: registers a wrong statement of dimensions."""

    def register(restate: Restate) -> Restate:
        WAYS[name] = Way(name, Call.result, ("dims",), restate)
        return restate

    return register


Change = Callable[[Dense, Call], Dense | None]


def on_results(name: str, *laws: str) -> Callable[[Change], Change]:
    """Decorator: registers a change of each result (the values of a sparse one), which returns None for no change."""

    def register(change: Change) -> Change:
        def on_all(call: Call) -> Any:
            def on_one(leaf: object) -> Any:
                if isinstance(leaf, Permuted):
                    return leaf.like(on_one(leaf.base))
                if isinstance(leaf, Sparse):
                    values = change(leaf.values, call)
                    call.changed |= values is not None
                    return leaf if values is None else leaf.like(values)
                if type(leaf) is Tensor:  # a plain result: it has values to change, but no mask
                    record = change(Dense(leaf), call)
                    call.changed |= record is not None and record.data is not leaf
                    return leaf if record is None else record.data
                if not isinstance(leaf, Dense):
                    return leaf
                record = change(leaf, call)
                call.changed |= record is not None
                return leaf if record is None else record

            return tree_map(on_one, call.result())

        way(name, *laws)(on_all)
        return change

    return register


def leaking(name: str, *laws: str) -> Callable[[Change], Change]:
    """Like `on_results`, for floating-point and complex results of calls in which such an operand is partly invalid."""

    def register(change: Change) -> Change:
        def guarded(result: Dense, call: Call) -> Dense | None:
            if not leaky(call) or result.dtype not in NUMBERS or not some_valid(result):
                return None
            return change(result, call)

        return on_results(name, *laws)(guarded)

    return register


def leaky(call: Call) -> list[Dense]:
    return [r for r in call.partial() if r.dtype in NUMBERS]


def on_gradients(name: str) -> Callable[[Change], Change]:
    """Like `on_results`, for results that require grad."""

    def register(change: Change) -> Change:
        def guarded(result: Dense, call: Call) -> Dense | None:
            differentiable = result.data.requires_grad and torch.is_grad_enabled() and not being_traced(result.data)
            return change(result, call) if differentiable and some_valid(result) else None

        return on_results(name, "P5", "P3")(guarded)

    return register
