"""How a rule is made wrong: its calls as a mutation sees them, and decorators for kinds of mutations.

A way gets a :class:`Call` of a rule, runs the right rule, and changes its result or its operands. It says whether it
changed anything that can be seen (``call.changed``): a way that never does so has nothing to say about a rule.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.trees import tree_leaves, tree_map
from op_registry.records.dense import Dense
from op_registry.records.tracing import being_traced
from op_registry.rule import Run
from op_registry.sparse.permuted import Permuted
from op_registry.sparse.record import Sparse

NUMBERS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


@dataclass
class Call:
    """One call of a right rule."""

    run: Run
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    # What the way keeps from one call to the next.
    memory: dict[Any, Any]
    changed: bool = False

    def result(self) -> Any:
        return self.run(*self.args, **self.kwargs)

    def records(self) -> list[Dense]:
        """Every dense record among the arguments; of a sparse record what it stores."""
        leaves = (_values(leaf) for leaf in tree_leaves((self.args, self.kwargs)))
        return [leaf for leaf in leaves if isinstance(leaf, Dense)]

    def partial(self) -> list[Dense]:
        """The records that have something invalid; none while a graph is traced, when nobody knows."""
        return [r for r in self.records() if some_invalid(r)]

    def with_records(self, change: Callable[[Dense, int], Dense]) -> Any:
        """The right rule's result for other records: `change` of each one and its number in `records`."""
        number = itertools.count()

        def changed(leaf: Any) -> Any:
            if isinstance(leaf, Permuted):
                return leaf.like(changed(leaf.base))
            if isinstance(leaf, Sparse):
                return leaf.like(change(leaf.values, next(number)))
            return change(leaf, next(number)) if isinstance(leaf, Dense) else leaf

        args, kwargs = tree_map(changed, (self.args, self.kwargs))
        return self.run(*args, **kwargs)


def _values(leaf: Any) -> Any:
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
    """A number that depends on everything that is hidden, and on nothing else."""
    parts = []
    for r in records:
        assert r.valid is not None
        parts.append(torch.where(r.valid, torch.zeros((), dtype=r.dtype), r.data).sum().real.to(torch.float64))
    return torch.stack(parts).sum()


@dataclass(frozen=True)
class Way:
    """A way of being wrong, by name; `laws` are those tried first, which are meant to see it."""

    name: str
    change: Callable[[Call], Any] = field(repr=False)
    laws: tuple[str, ...] = ()

    def mutated(self, run: Run, seen: Changes) -> Run:
        """The run that is wrong in this way; `seen` counts its calls, and those in which it changed something."""
        memory: dict[Any, Any] = {}

        def mutant(*args: Any, **kwargs: Any) -> Any:
            call = Call(run, args, kwargs, memory)
            seen.calls += 1
            try:
                return self.change(call)
            finally:
                seen.changed += call.changed

        return mutant


@dataclass
class Changes:
    """How often a mutant ran, and how often what it did could have been seen."""

    calls: int = 0
    changed: int = 0


WAYS: dict[str, Way] = {}


def way(name: str, *laws: str) -> Callable[[Callable[[Call], Any]], Callable[[Call], Any]]:
    """Decorator: a way of being wrong."""

    def keep(change: Callable[[Call], Any]) -> Callable[[Call], Any]:
        WAYS[name] = Way(name, change, laws)
        return change

    return keep


Change = Callable[[Dense, Call], Dense | None]


def on_results(name: str, *laws: str) -> Callable[[Change], Change]:
    """Decorator: a change of each result by itself, of a sparse one of its values; None where nothing changes."""

    def keep(change: Change) -> Change:
        def on_all(call: Call) -> Any:
            def on_one(leaf: Any) -> Any:
                if isinstance(leaf, Permuted):
                    return leaf.like(on_one(leaf.base))
                if isinstance(leaf, Sparse):
                    values = change(leaf.values, call)
                    call.changed |= values is not None
                    return leaf if values is None else leaf.like(values)
                if type(leaf) is Tensor:  # a plain answer: its values may be wrong, a mask it has none
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

    return keep


def leaking(name: str, *laws: str) -> Callable[[Change], Change]:
    """As `on_results`, of results in numbers, where an operand in numbers hides something."""

    def keep(change: Change) -> Change:
        def guarded(result: Dense, call: Call) -> Dense | None:
            if not leaky(call) or result.dtype not in NUMBERS or not some_valid(result):
                return None
            return change(result, call)

        return on_results(name, *laws)(guarded)

    return keep


def leaky(call: Call) -> list[Dense]:
    return [r for r in call.partial() if r.dtype in NUMBERS]


def on_gradients(name: str) -> Callable[[Change], Change]:
    """As `on_results`, of results that require grad."""

    def keep(change: Change) -> Change:
        def guarded(result: Dense, call: Call) -> Dense | None:
            differentiable = result.data.requires_grad and torch.is_grad_enabled() and not being_traced(result.data)
            return change(result, call) if differentiable and some_valid(result) else None

        return on_results(name, "P5", "P3")(guarded)

    return keep
