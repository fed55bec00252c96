"""Which operators are supported, and how, according to `resolve`, which dispatch uses too.

Each entry of torch's operator database, and each core aten overload, is one of

    rule            has its own rule
    derived         follows the rule of its functional or single-tensor form
    decomposes      decomposes in torch, in Python or C++, into operators that are all supported (found by running it)
    opaque          supported if every element is valid, refused otherwise
    refused         refused, for a stated reason
    not applicable  has no tensor to mask, or does not run on this machine
    missing         the operator, or one that it decomposes into, has no rule

What the entries call is stored by :mod:`op_registry.report.database_calls`, and measured again on request. Storages are
covered by :mod:`op_registry.report.sparse_coverage`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.conformance.randomness import start_random_numbers
from op_registry.conformance.samples import (
    NO_TENSOR,
    NOT_ON_THIS_MACHINE,
    DatabaseOperator,
    Sample,
    chosen,
    database,
)
from op_registry.conformance.trees import tree_leaves
from op_registry.conformance.watching import Interpreter
from op_registry.progress import progress
from op_registry.registry import registry
from op_registry.report import database_calls
from op_registry.report import sparse_coverage as stored_coverage
from op_registry.report.database_calls import Calls
from op_registry.resolve import resolve
from op_registry.rule import takes_tensor
from op_registry.schema import single_form

STATES = ("rule", "derived", "decomposes", "opaque", "refused", "not applicable", "missing")
SERVED = ("rule", "derived", "decomposes")


@dataclass(frozen=True)
class Entry:
    """How one operator, or one callable that torch writes in Python (python_level.py), is supported."""

    name: str
    # One of STATES, or of those of callables.
    state: str
    # Which operators are missing, opaque or refused, and why.
    note: str
    family: str
    # The dtypes that it takes, according to torch's database.
    dtypes: frozenset[torch.dtype] = frozenset()
    # The least sparse form of what it calls, see sparse_coverage.form.
    form: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.state}{f' ({self.note})' if self.note else ''}"


class Explorer(Interpreter):
    """Follows masked tensors through a plain call, and records how each operator that they reach is supported."""

    def __init__(self) -> None:
        super().__init__()
        self.states: dict[OpOverload, str] = {}

    def evaluate(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.anything_noted(args, kwargs):
            return op(*args, **kwargs)
        state = self.states[op] = state_of(op)
        if state == "decomposes":
            return self.decompose(op, args, kwargs)
        result = op(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.note(leaf, True)
        return result


def state_of(op: OpOverload) -> str:
    """How an overload is supported. What it decomposes into is not checked here, but by :class:`Explorer`."""
    meaning = resolve(op)
    if meaning.rule is not None:
        if meaning.rule.category.name in ("opaque", "refused"):
            return meaning.rule.category.name
        return "rule" if meaning.base is op else "derived"
    if meaning.kind == "each of a list":
        single = single_form(op)
        served = single is not None and any(state_of(getattr(single, name)) in SERVED for name in single.overloads())
        return "derived" if served else "missing"
    return "decomposes" if meaning.kind == "decomposes" else "missing"


def reasons(ops: Iterable[OpOverload]) -> str:
    """Unsupported overloads, grouped by the reason that their rule gives: ``a, b: reason; c``."""
    by_reason: dict[str, list[str]] = {}
    for op in sorted(ops, key=str):
        rule = resolve(op).rule
        by_reason.setdefault(rule.traits.reason if rule is not None else "", []).append(str(op))
    return "; ".join(", ".join(names) + (f": {reason}" if reason else "") for reason, names in by_reason.items())


def family_of(op: OpOverload) -> str:
    """The family of an overload's rule: its folder in op_registry/ops, or its file if the family is a single file."""
    rule = resolve(op).rule
    if rule is None:
        return ""
    inside = rule.where.rpartition("/ops/")[2]
    return inside.partition("/")[0] if "/" in inside else inside.partition(".")[0]


def _pieces(sample: Sample) -> dict[OpOverload, str] | None:
    """Every operator that a sample calls on its tensors, and how it is supported; None if plain torch can't run it."""
    explorer = Explorer()
    for tensor in sample.tensors:
        explorer.note(tensor, True)
    start_random_numbers(0)
    try:
        explorer.run(sample.fn, *sample.args, **sample.kwargs)
    except Exception:
        return explorer.states or None
    return explorer.states


def calls_of(operator: DatabaseOperator, most: int = 40) -> Calls:
    """What an entry of the database calls, determined by running its samples."""
    name, dtypes = operator.name, operator.dtypes
    samples = operator.samples(operator.preferred_dtype) if dtypes else []
    if not samples:
        return Calls(name, dtypes, note=NOT_ON_THIS_MACHINE)
    with_tensors = [s for s in samples if s.tensors]
    if not with_tensors:
        return Calls(name, dtypes, note=NO_TENSOR)
    runs = [pieces for s in chosen(with_tensors, most) if (pieces := _pieces(s)) is not None]
    if not runs:
        return Calls(name, dtypes, note=NOT_ON_THIS_MACHINE)
    ops = dict.fromkeys(op for pieces in runs for op in pieces)
    return Calls(name, dtypes, any(len(pieces) > 1 for pieces in runs), tuple(ops))


def entry_of(operator: DatabaseOperator, most: int = 40) -> Entry:
    """How an entry of the database is supported, determined by running its samples."""
    return entry_from(calls_of(operator, most))


def entry_from(calls: Calls) -> Entry:
    """How an entry is supported by the current rules, given what it calls."""
    if calls.note:
        return Entry(calls.name, "not applicable", calls.note, "", calls.dtypes)
    pieces = {op: state_of(op) for op in calls.ops}
    families = Counter(f for op in pieces if (f := family_of(op)))
    family = families.most_common(1)[0][0] if families else ""
    for state in ("missing", "refused", "opaque"):
        in_state = [op for op, s in pieces.items() if s == state]
        if in_state:
            form = "densifies" if state == "missing" else "refused"
            return Entry(calls.name, state, reasons(in_state), family, calls.dtypes, form)
    served = [s for s in pieces.values() if s in SERVED]
    if not served:
        return Entry(calls.name, "not applicable", "calls no operator on a tensor", family, calls.dtypes)
    state = "decomposes" if calls.composed or "decomposes" in served else "derived" if "derived" in served else "rule"
    return Entry(calls.name, state, "", family, calls.dtypes, stored_coverage.form_of_all(list(pieces)))


def measure() -> list[Calls]:
    """What every entry of torch's operator database calls, determined by running its samples. Takes half a minute."""
    with warnings.catch_warnings():
        # Samples of deprecated and experimental operators warn.
        warnings.simplefilter("ignore")
        operators = database().values()
        return [calls_of(operator) for operator in progress(operators, len(operators), "entry")]


def entries(calls: Iterable[Calls] | None = None) -> Iterator[Entry]:
    """Every entry of torch's operator database, from `calls` or from the stored table of calls."""
    for entry_calls in database_calls.known().values() if calls is None else calls:
        yield entry_from(entry_calls)


def core_overloads() -> list[OpOverload]:
    """The aten overloads that torch tags as core and that take a tensor.

    Not sym_size and the like: they read the wrapper's own geometry, and torch lists them only after their first use.
    """
    overloads = []
    for name in sorted(n for n in dir(torch.ops.aten) if not n.startswith("sym_")):
        packet = getattr(torch.ops.aten, name, None)
        if not isinstance(packet, torch._ops.OpOverloadPacket):
            continue
        for overload in packet.overloads():
            op = getattr(packet, overload)
            if torch.Tag.core in op.tags and takes_tensor(op):
                overloads.append(op)
    return overloads


def core_entries() -> Iterator[Entry]:
    """Every core aten overload."""
    for op in core_overloads():
        state = state_of(op)
        yield Entry(str(op), state, "" if state in SERVED else reasons([op]), family_of(op))


def table(entries: Sequence[Entry], title: str, states: Sequence[str] = STATES) -> str:
    """Counts by family and in total."""
    families: dict[str, Counter[str]] = {}
    for entry in entries:
        families.setdefault(entry.family or "-", Counter())[entry.state] += 1
    head = f"{title:16s}" + "".join(f"{state:>15s}" for state in states)
    lines = [head]
    lines += [
        f"{family:16s}" + "".join(f"{families[family][state]:15d}" for state in states) for family in sorted(families)
    ]
    total = Counter(entry.state for entry in entries)
    lines.append(f"{'total ' + str(len(entries)):16s}" + "".join(f"{total[state]:15d}" for state in states))
    return "\n".join(lines)


# The dtypes for which entries are counted.
DTYPES = ("float32", "float64", "float16", "bfloat16", "complex64", "int64", "int32", "uint8", "bool")


def by_dtype(entries: Sequence[Entry]) -> str:
    """For each dtype, how many of the entries that take it are supported, by family and in total."""
    families: dict[str, list[Entry]] = {}
    for entry in entries:
        families.setdefault(entry.family or "-", []).append(entry)

    def row(name: str, entries: Sequence[Entry]) -> str:
        cells = []
        for dtype in DTYPES:
            taking = [e for e in entries if getattr(torch, dtype) in e.dtypes and e.state != "not applicable"]
            served = sum(e.state in SERVED for e in taking)
            cells.append(f"{served} of {len(taking)}" if taking else "")
        return f"{name:16s}" + "".join(f"{cell:>12s}" for cell in cells)

    lines = [f"{'served, by dtype':16s}" + "".join(f"{dtype:>12s}" for dtype in DTYPES)]
    lines += [row(family, families[family]) for family in sorted(families)]
    return "\n".join([*lines, row("total", entries)])


def listing(entries: Sequence[Entry]) -> str:
    """One line for each entry, as in the file that tests compare with (tests/report/coverage.expect)."""
    return "\n".join(str(entry) for entry in sorted(entries, key=lambda e: e.name))


def expectation(calls: Iterable[Calls] | None = None) -> str:
    """The content of tests/report/coverage.expect: how each entry and each core overload is supported."""
    return f"{listing(list(entries(calls)))}\n\n{listing(list(core_entries()))}"


def report(verbose: bool = False, calls: Sequence[Calls] | None = None) -> str:
    """The output of `python -m op_registry coverage`, from `calls` or from the stored table of calls."""
    how = "measured just now" if calls is not None else f"{database_calls.measured_how()}; --measure runs it again"
    in_database, core = list(entries(calls)), list(core_entries())
    served = sum(e.state in SERVED for e in in_database)
    known, shares = {e.name: e.form for e in in_database if e.form}, stored_coverage.measured()
    parts = [
        table(in_database, "family"),
        "",
        by_dtype(in_database),
        "",
        table(core, "core aten"),
        "",
        stored_coverage.table(known, shares),
        "",
        f"{len(in_database)} entries of torch's operator database: {served} served as rule, derived or decomposes; "
        f"{len(registry)} overloads have a rule",
        f"what the entries call: {how}",
        f"what stays sparse: {database_calls.measured_how(stored_coverage.MEASURED)}",
    ]
    for state in ("missing", "refused", "not applicable"):
        in_state = [e for e in [*in_database, *core] if e.state == state]
        if in_state:
            parts += ["", f"{state}:", *(f"    {e.name}: {e.note}" for e in in_state)]
    if verbose:
        parts += ["", listing(in_database), "", stored_coverage.listing(known, shares)]
    return "\n".join(parts)
