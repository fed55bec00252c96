"""``python -m op_registry explain NAME``: what an operator does on masked tensors, and where that is defined.

NAME is an operator (``aten.cumsum``, ``aten.add_.Tensor``, ``mylib.gelu_fast``), a function or module in torch that
calls operators (``torch.cumsum``, ``F.softmax``, ``torch.Tensor.add_``, ``torch.linalg.norm``, ``torch.nn.LSTM``), or
an entry of torch's operator database, as listed by `coverage`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.conformance.gaps import TABLE
from op_registry.conformance.masks import masking
from op_registry.conformance.oracles import oracle_for
from op_registry.conformance.own_operators import Arguments, RegisteredOperator
from op_registry.conformance.plain_torch import Recorder, calls_of
from op_registry.conformance.python_level import all_names
from op_registry.conformance.sample import Sample, tree_leaves, tree_map
from op_registry.conformance.samples import chosen, database
from op_registry.conformance.variations import storable
from op_registry.errors import MaskedSemanticsError
from op_registry.laws.categories import COMPOSITE, REFUSED
from op_registry.laws.inside import rules_inside_functions
from op_registry.progress import progress
from op_registry.records.dense import Dense, map_tensors
from op_registry.records.validity import as_int8
from op_registry.registry import registry
from op_registry.report import coverage, python_level
from op_registry.report.names import Named, Operator, UnknownName, named, operator_name, overloads_of
from op_registry.resolve import Meaning, resolve
from op_registry.rule import Gap, InsideRule, Rule, in_dispatcher, packet_name, path_in_package, takes_tensor
from op_registry.schema import single_form
from op_registry.sparse.convert import from_dense
from op_registry.sparse.layout import BUILT_IN, Layout
from op_registry.sparse.lowering import OnCall, lowering_of, never, run_lowering, run_sparsely, ways_of
from op_registry.sparse.permuted import Permuted
from op_registry.sparse.record import NotLowered, Sparse

WIDTH = 120
# How many samples of a Python function show what it calls.
FEW = 3
HOW = {"each of a list": "the operator on each element of a list"}


def explain(name: object, *, samples: bool = True) -> str:
    """Explain `name`, or an operator, a function or a class of torch itself: a paragraph for each of its rules.

    With `samples`, the operator's sample calls are run in every sparse layout, which takes some seconds for torch's own
    operators. Raises :class:`UnknownName` (one line, with the nearest names) if nothing has this name.
    """
    try:
        target = named(name)
    except UnknownName:
        entry = str(name).replace(".", "_")
        if entry not in coverage.known_calls():
            raise
        return _of_entry(entry)
    if target.function is not None:
        return _of_function(target, samples)
    if target.operator is None:
        return (
            f"{target.name} is written in C++ and no operator has its name: it returns a property of a tensor, or "
            "converts it to Python objects. Operators that it calls follow their own rules."
        )
    full_name = operator_name(target.operator)
    head = f"{target.name} is {full_name}.\n" if target.name != full_name else ""
    return head + of_operator(target.operator, samples)


def as_values(name: str, samples: bool) -> dict[str, Any]:
    """The text of `explain`, and the rule of each overload."""
    text = explain(name, samples=samples)
    return {"name": name, "overloads": [_fields(op) for op in _overloads(name)], "text": text}


def _overloads(name: str) -> list[OpOverload]:
    """The overloads that a name stands for: an operator's overloads, or those that an entry or a function calls."""
    try:
        target = named(name)
    except UnknownName:
        return list(coverage.known_calls()[name.replace(".", "_")].ops)
    called = _called(target)[1] if target.operator is None else overloads_of(target.operator)
    return [op for op in called if takes_tensor(op) and in_dispatcher(op)]


def _called(target: Named) -> tuple[str, Sequence[OpOverload]]:
    """Where it is seen what a Python function calls, and the overloads: in torch's database, or in its samples."""
    below_torch = target.name.removeprefix("torch.")
    known = coverage.known_calls().get(below_torch.removeprefix("Tensor.").replace(".", "_"))
    if known is not None and known.ops:
        return f"with torch's samples (entry {known.name})", known.ops
    listed = {*all_names()}.intersection((below_torch, f"torch.{below_torch}", f"functional.{below_torch}"))
    samples: list[Sample] = []
    with warnings.catch_warnings(), contextlib.suppress(ImportError):  # torch's databases need NumPy
        warnings.simplefilter("ignore")  # deprecated functions, modules without parameters
        for name in listed if target.function is not None else ():
            samples += [] if python_level.reason_not_called(name) else python_level.samples_of(name)
    calls = (op for s in samples[:FEW] for op in calls_of(s.fn, *s.args, **s.kwargs))
    return "in sample calls", list(dict.fromkeys(op for op in calls if takes_tensor(op)))


def _fields(op: OpOverload) -> dict[str, Any]:
    """How an overload is served, and by which rule."""
    meaning = resolve(op)
    rule = meaning.rule
    fields: dict[str, Any] = {"overload": str(op), "state": coverage.state_of(op)}
    if rule is not None:
        fields |= {"rule": rule.name, "category": rule.category.name, "where": rule.where, "base": str(meaning.base)}
        fields["gaps"] = [str(gap) for gap in rule.gaps]
    return fields


def of_operator(op: Operator, samples: bool = True) -> str:
    """Explain an overload, or all overloads of a packet."""
    by_rule: dict[int, tuple[Rule, list[Meaning]]] = {}
    others: dict[str, list[str]] = {}
    for overload in overloads_of(op):
        meaning = resolve(overload) if takes_tensor(overload) and in_dispatcher(overload) else None
        if meaning is not None and meaning.rule is not None:
            by_rule.setdefault(id(meaning.rule), (meaning.rule, []))[1].append(meaning)
        else:
            others.setdefault(_without_rule(overload, meaning), []).append(str(overload))
    texts = [_of_rule(rule, meanings, samples) for rule, meanings in by_rule.values()]
    texts += ["\n".join([*_wrapped(", ".join(names), ""), *_row("", text)]) for text, names in others.items()]
    return "\n".join(texts)


def _without_rule(op: OpOverload, meaning: Meaning | None) -> str:
    """How an overload without a rule is supported."""
    if not in_dispatcher(op):
        return "TorchScript only: Python cannot call it"
    if meaning is None:
        return "takes no tensor, so that no mask can reach it: plain torch"
    if meaning.kind == "each of a list":
        single = single_form(op)
        return f"{operator_name(single)} on each element of its lists" if single is not None else HOW["each of a list"]
    if meaning.kind == "decomposes":
        calls = coverage.known_calls()
        pieces = next((c.ops for e in entries_that_call(op) if (c := calls[e]).ops[:1] == (op,)), ())
        others = ", ".join(str(p) for p in pieces if p is not op)
        return "decomposes: torch defines it by other operators, each of which follows its own rule" + (
            f". With torch's samples: {others}" if others else ""
        )
    return (
        "missing: it has no rule and torch has no decomposition of it, so that it is refused on masked tensors. "
        f"op_registry.authoring.elementwise(torch.ops.{op}), another category or @masked_rule gives it a meaning"
    )


def _of_rule(rule: Rule, meanings: list[Meaning], samples: bool) -> str:
    """Explain a rule, and the overloads that it serves."""
    base = meanings[0].base
    assert base is not None
    same = {id(f): f for f in (m.base for m in meanings) if f is not None}
    name = packet_name(base) if base.namespace != "aten" else f"aten.{packet_name(base)}"
    lines = [f"{name.replace('::', '.')} ({', '.join(f._overloadname for f in same.values())}): {rule.category.name}"]
    lines += _row("law", rule.category.law)
    lines += _meaning(rule)
    lines += _row("rule", f"{rule.where}, run by {name_of(rule.run)} ({where_written(rule.run)})")
    if rule.run is rule.category.run:
        lines += _row("", notes_of(rule.run).partition("\n\n")[0])
    traits = ", ".join(
        f"{k}={name_of(v) if callable(v) else repr(v)}" for k, v in rule.traits.stated().items() if k != "dims"
    )
    lines += _row("traits", traits)
    lines += _row("dims", str(rule.dims or "nothing is stated"))
    lines += _row("serves", ", ".join(f"{m.op}{_how(m)}" for m in meanings))
    lines += _storage(rule, tried(base, rule) if samples else {})
    lines += _row("oracle", _oracle(base))
    lines += _row("samples", _samples(base, rule))
    lines += _row("gaps", "; ".join(map(str, gaps_of(base, rule))) or "none")
    return "\n".join(lines)


def law_of_file(rule: Rule) -> list[str]:
    """The paragraphs in which the file of a built-in rule states a law; they begin with "Law"."""
    if not rule.is_built_in:
        return []
    module = importlib.import_module(rule.where.partition(".")[0].replace("/", "."))
    return [paragraph for paragraph in (module.__doc__ or "").strip().split("\n\n") if paragraph.startswith("Law")]


def words_of(rule: Rule) -> list[str]:
    """What the rule's own function says it means, by paragraphs; nothing for a rule that only states traits."""
    notes = notes_of(rule.run)
    return [] if rule.run is rule.category.run or not notes else notes.split("\n\n")


def _meaning(rule: Rule) -> list[str]:
    """What the file of a rule says, and the rule itself."""
    return [*_rows("family", law_of_file(rule)), *_rows("means", words_of(rule))]


def _how(meaning: Meaning) -> str:
    if meaning.base is meaning.op:
        return ""
    return f" ({HOW[meaning.kind]})" if meaning.kind in HOW else f" ({meaning.kind})"


def _storage(rule: Rule, outcomes: Mapping[str, Tried]) -> list[str]:
    """How a rule runs in sparse storage; and the outcome of sample calls, for each group of layouts that share it."""
    ways = alternatives(rule)
    by_outcome = coverage.grouped((str(outcomes[n]) if ways and n in outcomes else "", n) for n in LAYOUTS)
    layouts = ", ".join(name for names in by_outcome.values() for name in names)
    lines = _row("lowering", f"{layouts}: {'; else '.join(ways) or without_lowering(rule)}")
    for outcome, names in by_outcome.items():
        if outcome:
            lines += [f"{'':14s}{line}" for line in _wrapped(f"tried as {', '.join(names)}: {outcome}", "  ")]
    return lines


def _oracle(op: OpOverload) -> str:
    """The oracle with which conformance compares results."""
    rule = registry.get(op)
    oracle = rule.oracles[0] if rule is not None and rule.oracles else oracle_for(op)
    if oracle is None:
        return "none: conformance decomposes the operator, or has nothing to compare its partly valid results with"
    summary = first_sentence(oracle)
    return f"{name_of(oracle)} ({where_written(oracle)})" + (f": {summary}" if summary else "")


def _samples(op: OpOverload, rule: Rule) -> str:
    """Which calls conformance runs."""
    if rule.sample_makers:
        return ", ".join(f"{name_of(maker)} ({where_written(maker)})" for maker in rule.sample_makers)
    entries = entries_that_call(op)
    if entries:
        more = f" and {len(entries) - 6} more" if len(entries) > 6 else ""
        return f"torch's operator database: {', '.join(entries[:6])}{more}"
    if op.namespace == "aten":
        return "none: no entry of torch's operator database calls it"
    return "generated from its schema, if it runs on numbers and tensors of one shape; otherwise add @rule.samples"


def gaps_of(op: OpOverload, rule: Rule) -> Iterable[Gap]:
    """The named exceptions of the rule, and of the entry of its name in torch's database."""
    return [*rule.gaps, *TABLE.get(op._schema.name.removeprefix("aten::"), ())]


def _of_function(target: Named, samples: bool) -> str:
    """Explain a Python function: which operators it calls, according to samples, and what they do."""
    assert target.function is not None
    where, called = _called(target)
    lines = [f"{target.name} is written in Python ({where_written(target.function)}): it follows its operators' rules."]
    lines += _row("seen", f"{where}: {', '.join(map(str, called))}" if called else "no sample calls an operator")
    for rule in _inside(target.function):
        lines += _rows("inside", [f"{rule.ops[0]} is {rule.category.name} [{rule.where}]", *words_of(rule)])
    operators = [op for op in called if resolve(op).rule is not None]
    if len(operators) == 1:
        return "\n".join([*lines, of_operator(operators[0], samples)])
    return "\n".join([*lines, *(f"  {text}" for op in operators for text in _in_short(op))])


def _inside(function: Callable[..., object]) -> list[InsideRule]:
    """The rules that only hold in `function`, or in a module or package that it is in."""
    function = inspect.unwrap(function)
    module = f"{function.__module__}."
    return [
        rule
        for rule in rules_inside_functions()
        if rule.function is function
        or (isinstance(rule.function, ModuleType) and module.startswith(f"{rule.function_name}."))
    ]


def _of_entry(name: str) -> str:
    """Explain an entry of torch's operator database: what its samples call, and how many trials stayed sparse."""
    calls = coverage.known_calls()[name]
    lines = [f"{name} is an entry of torch's operator database."]
    lines += _row("calls", ", ".join(map(str, calls.ops)) or calls.note)
    shares = coverage.measured_shares().get(name, {})
    stayed_sparse = [f"{layout} {stayed} of {ran}" for layout, (stayed, ran, _) in shares.items() if ran]
    lines += _row("sparse", f"trials that stayed sparse: {', '.join(stayed_sparse)}" if stayed_sparse else "")
    return "\n".join([*lines, *(f"  {text}" for op in calls.ops for text in _in_short(op))])


def _in_short(op: OpOverload) -> list[str]:
    """A line for the rule of an overload, or for another way of support; and what the rule says."""
    if not takes_tensor(op) or not in_dispatcher(op):
        return []
    meaning = resolve(op)
    rule = meaning.rule
    if rule is None:
        return [f"{op}: {meaning.kind}"]
    words = (*law_of_file(rule), *words_of(rule))
    said = (line for each in words for line in _wrapped(f"  {each}", "  "))
    return [f"{op}: {rule.category.name} [{rule.where}]", *said]


def _row(title: str, text: str) -> list[str]:
    """A titled paragraph; no lines if there is no text."""
    return [f"  {title if n == 0 else '':10s}{line}" for n, line in enumerate(_wrapped(text, ""))] if text else []


def _rows(title: str, paragraphs: Iterable[str]) -> list[str]:
    return [line for n, text in enumerate(paragraphs) for line in _row("" if n else title, text)]


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH - 12, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


# ------------------------------------------ the functions behind a rule, and what its lowerings do with sparse operands

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


def alternatives(rule: Rule) -> list[str]:
    """How a rule runs in sparse storage: the functions that it tries, in order, and where they are defined."""
    shared = "" if Sparse in rule.lowerings else f", every {rule.category.name} rule"
    return [_titled(way, shared) for way in ways_of(lowering_of(rule, Sparse))]


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
Way = OnCall | Callable[..., Any]


def _titled(way: Way, shared: str = "") -> str:
    """What a function of a lowering does, and where it is defined; for one that supports no call, its reason."""
    run = way.run if isinstance(way, OnCall) else way
    if (reason := never_reason(way)) is not None:
        return f"stored densely: {reason}"
    summary = first_sentence(run) or written_as(run).__qualname__.replace(".<locals>", "")
    return f"{summary} ({where_written(run)}{shared})"


def never_reason(way: Way) -> str | None:
    """Why a function of a lowering supports no call; None if it supports some."""
    run = way.run if isinstance(way, OnCall) else way
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
    entries = [calls.name for calls in coverage.known_calls().values() if op in calls.ops]
    return sorted(entries, key=lambda entry: (not entry.endswith(name), len(entry), entry))
