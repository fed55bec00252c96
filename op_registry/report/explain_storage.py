"""The part of `explain` about sparse storage: how an overload runs in each layout, or why it needs dense storage.

A lowering may not support all calls. So the overload's samples are run on records in each layout, and the reasons for
unsupported calls are counted.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.conformance.masks import masking
from op_registry.conformance.own_operators import Arguments, RegisteredOperator
from op_registry.conformance.sample import Sample
from op_registry.conformance.samples import chosen, database
from op_registry.conformance.stored_samples import storable
from op_registry.conformance.trees import tree_leaves, tree_map
from op_registry.conformance.watching import Recorder
from op_registry.errors import MaskedSemanticsError
from op_registry.laws.categories import COMPOSITE, REFUSED
from op_registry.progress import progress
from op_registry.records.dense import Dense, map_tensors
from op_registry.records.validity import as_int8
from op_registry.report import database_calls
from op_registry.rule import Rule, path_in_package
from op_registry.sparse.layout import Layout
from op_registry.sparse.layout_registry import BUILT_IN
from op_registry.sparse.lowering import ForRule, OnCall, lowering_of, never, run_lowering, run_sparsely, ways_of
from op_registry.sparse.permuted import Permuted
from op_registry.sparse.record import NotLowered, Sparse, from_dense

LAYOUTS = {layout.short if layout.of_sequences else layout.short.upper(): layout for layout in BUILT_IN}

# The most samples of an operator to run in each layout.
MOST = 8


def written_as(facet: Callable[..., Any]) -> Any:
    """The function behind a callable: that of a partial or a wrapper, or an object's ``__call__``."""
    while isinstance(facet, functools.partial):
        facet = facet.func
    function = inspect.unwrap(facet)
    return function if hasattr(function, "__code__") else getattr(type(function), "__call__", function)  # noqa: B004


def name_of(facet: Callable[..., Any]) -> str:
    """The name of the function behind a callable."""
    return getattr(written_as(facet), "__name__", repr(facet))


def where_written(facet: Callable[..., Any]) -> str:
    """The file and line of the function behind a callable: ``op_registry/ops/scans/rules.py:24``."""
    function = written_as(facet)
    code = getattr(function, "__code__", None)
    if code is None:
        return repr(facet)
    return f"{path_in_package(code.co_filename, function.__module__)}:{code.co_firstlineno}"


def notes_of(facet: Callable[..., Any]) -> str:
    """A function's docstring; "" if it has none."""
    return inspect.getdoc(written_as(facet)) or ""


def first_sentence(facet: Callable[..., Any]) -> str:
    """The first line of a function's docstring."""
    return notes_of(facet).partition("\n")[0].rstrip(".")


def alternatives(rule: Rule, layout: Layout) -> list[str]:
    """How a rule runs in a layout: the functions that it tries, in order, and where they are defined."""
    shared = "" if Sparse in rule.lowerings else f", every {rule.category.name} rule"
    return [f"{_titled(way, shared)}" for way in ways_of(lowering_of(rule, Sparse))]


def taken_by(op: OpOverload, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The first function that supports a call on records, in the words of `alternatives`; "" if none does."""
    permuted: list[Permuted] = []
    map_tensors(permuted.append, [*args, *kwargs.values()], Permuted)
    for way in ways_of(lowering_of(rule, Permuted if permuted else Sparse)):
        try:
            run_lowering(way, rule, op, args, kwargs)
        except NotLowered:
            continue
        except Exception:
            return ""  # the call itself will raise the same error
        return _titled(way)
    return ""


# A function of a lowering, in whichever way it is called.
Way = ForRule | OnCall | Callable[..., Any]


def _titled(way: Way, shared: str = "") -> str:
    """What a function of a lowering does, and where it is defined; for one that supports no call, its reason."""
    run = way.run if isinstance(way, (ForRule, OnCall)) else way
    if (reason := never_reason(way)) is not None:
        return f"stored densely: {reason}"
    summary = first_sentence(run) or written_as(run).__qualname__.replace(".<locals>", "")
    return f"{summary} ({where_written(run)}{shared})"


def never_reason(way: Way) -> str | None:
    """Why a function of a lowering supports no call; None if it supports some."""
    run = way.run if isinstance(way, (ForRule, OnCall)) else way
    is_never = getattr(run, "__code__", None) is never("").__code__
    return str(inspect.getclosurevars(run).nonlocals["reason"]) if is_never else None


def without_lowering(rule: Rule) -> str:
    """What happens to sparse operands of a rule without a lowering, and why."""
    if rule.category is REFUSED:
        return f"refused, as in every storage: {rule.traits.reason or rule.category.law}"
    if rule.category is COMPOSITE:
        return "as the operators in which it is written"
    return f"stored densely: {rule.category.why_dense}"


@dataclass
class Tried:
    """The outcome of an overload's samples in one layout: how many never needed dense storage, and why others did."""

    stayed: int = 0
    refused: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def ran(self) -> int:
        return self.stayed + self.refused + self.reasons.total()

    def __str__(self) -> str:
        text = f"{self.stayed} of {self.ran} sample calls stay sparse"
        text += f", {self.refused} are refused" if self.refused else ""
        return "; ".join([text, *(f"{n}: {reason}" for reason, n in self.reasons.most_common(3))])


def tried(op: OpOverload, rule: Rule, most: int = MOST) -> Mapping[str, Tried]:
    """The outcome of an overload's sample calls, for each layout in which some of their tensors can be stored."""
    if rule.category is COMPOSITE:
        return {}  # it takes tensors, not records
    outcomes = {name: Tried() for name in LAYOUTS}
    calls = list(_calls(op, most))
    for call in progress(calls, len(calls), "call"):
        for name, layout in LAYOUTS.items():
            stored = _stored(call, layout)
            if stored is not None:
                _try(op, rule, stored, outcomes[name])
    return {name: outcome for name, outcome in outcomes.items() if outcome.ran}


def _try(op: OpOverload, rule: Rule, call: Arguments, outcome: Tried) -> None:
    try:
        run_sparsely(op, rule, *call)
    except NotLowered as reason:
        outcome.reasons[str(reason)] += 1
    except MaskedSemanticsError:
        outcome.refused += 1
    except Exception:
        # The rule does not support this call on dense storage either.
        return
    else:
        outcome.stayed += 1


def _stored(call: Arguments, layout: Layout) -> Arguments | None:
    """The arguments as half-valid records, stored in a layout where they fit; None if no tensor fits."""
    tensors = [leaf for leaf in tree_leaves(call) if isinstance(leaf, Tensor) and leaf.layout is torch.strided]
    half = masking("half", tensors)
    assert half is not None
    masks = dict(zip(map(id, tensors), half.full(tensors), strict=True))
    any_stored = False

    def record(leaf: object) -> Any:
        nonlocal any_stored
        if not isinstance(leaf, Tensor):
            return leaf
        mask = masks.get(id(leaf))
        dense = Dense(leaf, None if mask is None else as_int8(mask))
        if id(leaf) not in masks or leaf.ndim < layout.min_dims or not leaf.numel():
            return dense
        any_stored = True
        return from_dense(dense, layout, block=(1, 1) if layout.blocks else None)

    stored = tree_map(record, call)
    return stored if any_stored else None


def _calls(op: OpOverload, most: int) -> Iterator[Arguments]:
    """The arguments of an overload in samples: those of its own rule, or of torch's database."""
    if op.namespace != "aten":
        for sample in storable(RegisteredOperator(op).samples(torch.float32))[:most]:
            yield sample.args, sample.kwargs
        return
    recorded = (call for entry in entries_that_call(op)[:2] for call in _recorded(entry, op))
    yield from itertools.islice(recorded, most)


def _recorded(entry: str, op: OpOverload) -> Iterator[Arguments]:
    operator = database()[entry]
    samples: Sequence[Sample] = chosen(storable(operator.samples(operator.preferred_dtype)), MOST)
    for sample in samples:
        calls = Recorder().recorded(sample.fn, *sample.args, **sample.kwargs)
        yield from ((args, kwargs) for called, args, kwargs in calls if called is op)


def entries_that_call(op: OpOverload) -> list[str]:
    """Entries of torch's operator database whose samples call an overload; entries of the same name come first."""
    name = op._schema.name.partition("::")[2]
    entries = [calls.name for calls in database_calls.known().values() if op in calls.ops]
    return sorted(entries, key=lambda entry: (not entry.endswith(name), len(entry), entry))
