"""What `explain` says of sparse storage: how an overload runs in each layout, or why it has to be stored densely.

That there is a lowering does not say which calls it takes. So the overload's samples are run on records of each layout,
and the reasons of those that it does not take are counted.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.categories import COMPOSITE, REFUSED
from op_registry.conformance.masks import masking
from op_registry.conformance.own_operators import RegisteredOperator
from op_registry.conformance.sample import Sample
from op_registry.conformance.samples import chosen, database
from op_registry.conformance.stored_samples import storable
from op_registry.conformance.trees import tree_leaves, tree_map
from op_registry.conformance.watching import Recorder
from op_registry.errors import MaskedSemanticsError
from op_registry.records.dense import Dense, map_tensors
from op_registry.records.validity import as_int8
from op_registry.report import database_calls
from op_registry.rule import Rule, path_in_package
from op_registry.sparse.layout import BUILT_IN, Layout
from op_registry.sparse.lowering import FirstOf, ForRule, Lowering, lowering_of, never, run_sparsely
from op_registry.sparse.permuted import Permuted
from op_registry.sparse.record import NotLowered, Sparse, from_dense

LAYOUTS = {layout.short if layout.of_sequences else layout.short.upper(): layout for layout in BUILT_IN}

# Samples of an operator that are tried in each layout.
MOST = 8


def written_as(facet: Callable[..., Any]) -> Any:
    """The function that something callable was made of: what is in a partial, or wrapped, or an object's __call__."""
    while isinstance(facet, functools.partial):
        facet = facet.func
    found = inspect.unwrap(facet)
    return found if hasattr(found, "__code__") else getattr(type(found), "__call__", found)  # noqa: B004


def name_of(facet: Callable[..., Any]) -> str:
    """The name of the function that something callable was made of."""
    return getattr(written_as(facet), "__name__", repr(facet))


def where_written(facet: Callable[..., Any]) -> str:
    """``op_registry/ops/scans/rules.py:24``: where a function is written."""
    function = written_as(facet)
    code = getattr(function, "__code__", None)
    if code is None:
        return repr(facet)
    return f"{path_in_package(code.co_filename, function.__module__)}:{code.co_firstlineno}"


def notes_of(facet: Callable[..., Any]) -> str:
    """A function's docstring, "" where it has none."""
    return inspect.getdoc(written_as(facet)) or ""


def first_sentence(facet: Callable[..., Any]) -> str:
    """The first line of a function's docstring."""
    return notes_of(facet).partition("\n")[0].rstrip(".")


def alternatives(rule: Rule, layout: Layout) -> list[str]:
    """How a rule runs in a layout: the functions that are tried, in their order, and where they are written."""
    shared = "" if Sparse in rule.lowerings else f", every {rule.category.name} rule"
    return [f"{_titled(way, shared)}" for way in _ways(lowering_of(rule, Sparse))]


def taken_by(op: OpOverload, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The first function that takes a call on records, as `alternatives` says it; "" where none does."""
    turned: list[Permuted] = []
    map_tensors(turned.append, [*args, *kwargs.values()], Permuted)
    for way in _ways(lowering_of(rule, Permuted if turned else Sparse)):
        try:
            way.run(rule, op, *args, **kwargs) if isinstance(way, ForRule) else way(op, *args, **kwargs)
        except NotLowered:
            continue
        except Exception:
            return ""  # the call itself will raise it
        return _titled(way)
    return ""


# A function that may run a rule, with or without the rule in front of its arguments.
Way = ForRule | Callable[..., Any]


def _ways(lowering: Lowering | None) -> Iterator[Way]:
    """The functions that a lowering tries, in their order."""
    if isinstance(lowering, FirstOf):
        for each in lowering.alternatives:
            yield from _ways(each)
    elif lowering is not None:
        yield lowering


def _titled(way: Way, shared: str = "") -> str:
    """What a function does in a lowering, and where it is written; the reason of one that takes no call."""
    run = way.run if isinstance(way, ForRule) else way
    if getattr(run, "__code__", None) is never("").__code__:
        return f"stored densely: {inspect.getclosurevars(run).nonlocals['reason']}"
    says = first_sentence(run) or written_as(run).__qualname__.replace(".<locals>", "")
    return f"{says} ({where_written(run)}{shared})"


def without_lowering(rule: Rule) -> str:
    """What happens to sparse operands of a rule without a lowering, and why."""
    if rule.category is REFUSED:
        return f"refused, as in every storage: {rule.traits.get('reason', rule.category.law)}"
    if rule.category is COMPOSITE:
        return "as the operators that it is written in have it"
    return f"stored densely: {rule.category.why_dense}"


@dataclass
class Tried:
    """What came of an overload's samples in one layout: how many never needed dense storage, and why others did."""

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
    """What comes of an overload's sample calls in each layout in which something of them can be stored."""
    found = {name: Tried() for name in LAYOUTS}
    if rule.category is COMPOSITE:
        return {}  # it takes tensors, not records
    for args, kwargs in _calls(op, most):
        for name, layout in LAYOUTS.items():
            given = _stored((args, kwargs), layout)
            if given is not None:
                _try(op, rule, given, found[name])
    return {name: each for name, each in found.items() if each.ran}


def _try(op: OpOverload, rule: Rule, given: tuple[Any, Any], into: Tried) -> None:
    try:
        run_sparsely(op, rule, *given)
    except NotLowered as reason:
        into.reasons[str(reason)] += 1
    except MaskedSemanticsError:
        into.refused += 1
    except Exception:
        # What the rule does not take densely either is no sample.
        return
    else:
        into.stayed += 1


def _stored(call: Any, layout: Layout) -> Any:
    """The arguments as records, every tensor half masked, and stored in a layout where it can be; None if none can."""
    tensors = [leaf for leaf in tree_leaves(call) if isinstance(leaf, Tensor) and leaf.layout is torch.strided]
    half = masking("half", tensors)
    assert half is not None
    masks = dict(zip(map(id, tensors), half.full(tensors), strict=True))
    some = False

    def record(leaf: Any) -> Any:
        nonlocal some
        if not isinstance(leaf, Tensor):
            return leaf
        mask = masks.get(id(leaf))
        dense = Dense(leaf, None if mask is None else as_int8(mask))
        if id(leaf) not in masks or leaf.ndim < layout.least or not leaf.numel():
            return dense
        some = True
        return from_dense(dense, layout, block=(1, 1) if layout.blocks else None)

    given = tree_map(record, call)
    return given if some else None


def _calls(op: OpOverload, most: int) -> Iterator[tuple[Any, Any]]:
    """Arguments that samples give an overload: of its own rule, or of torch's database."""
    if op.namespace != "aten":
        for sample in storable(RegisteredOperator(op).samples(torch.float32))[:most]:
            yield sample.args, sample.kwargs
        return
    left = most
    for entry in entries_that_call(op)[:2]:
        for call in _recorded(entry, op):
            if not left:
                return
            left -= 1
            yield call


def _recorded(entry: str, op: OpOverload) -> Iterator[tuple[Any, Any]]:
    operator = database()[entry]
    samples: Sequence[Sample] = chosen(storable(operator.samples(operator.preferred_dtype)), MOST)
    for sample in samples:
        recorder = Recorder()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                recorder.run(sample.fn, *sample.args, **sample.kwargs)
        except Exception:
            # A sample that plain torch does not run on this machine calls nothing.
            continue
        yield from ((args, kwargs) for called, args, kwargs in recorder.calls if called is op)


def entries_that_call(op: OpOverload) -> list[str]:
    """Entries of torch's operator database whose samples call an overload; those of its own name first."""
    name = op._schema.name.partition("::")[2]
    found = [calls.name for calls in database_calls.known().values() if op in calls.ops]
    return sorted(found, key=lambda entry: (not entry.endswith(name), len(entry), entry))
