"""Which operators are served, and how: asked of the same `resolve` that dispatch asks.

Each entry of torch's operator database, and each core aten overload, is one of

    rule            a rule of its own
    derived         the rule of its functional or single-tensor form
    decomposes      torch's own definition, in Python or C++, every piece of which is served (found by taking it apart)
    opaque          right where everything is valid, refused elsewhere
    refused         refused, for a reason
    not applicable  there is nothing to mask, or this machine cannot run it, for a reason
    missing         nothing is known of it, or of a piece

What the entries call is known from :mod:`op_registry.report.database_calls` and measured anew on request. How each
fares on every storage is told in :mod:`op_registry.report.sparse_coverage`.
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
    """How one operator is served."""

    name: str
    state: str
    # The piece that is missing, opaque or refused, and for what reason.
    note: str
    family: str
    # The dtypes that it takes, as far as torch's database says so.
    dtypes: frozenset[torch.dtype] = frozenset()
    # Where the sparse forms of what it calls come from, see stored_coverage.
    form: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.state}{f' ({self.note})' if self.note else ''}"


class Explorer(Interpreter):
    """Follows masked tensors through a plain call, and writes down how each operator on the way is served."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[OpOverload, str] = {}

    def evaluate(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.anything_noted(args, kwargs):
            return op(*args, **kwargs)
        state = state_of(op)
        if state == "decomposes":
            self.found[op] = state
            return self.decompose(op, args, kwargs)
        self.found[op] = state
        result = op(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.note(leaf, True)
        return result


def state_of(op: OpOverload) -> str:
    """How `resolve` serves an overload; "decomposes" is believed here, see :class:`Explorer`."""
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
    """Overloads that are not served, and why, where a rule says so: each reason once, behind those that give it."""
    named: dict[str, list[str]] = {}
    for op in sorted(ops, key=str):
        rule = resolve(op).rule
        named.setdefault(rule.traits.get("reason", "") if rule is not None else "", []).append(str(op))
    return "; ".join(", ".join(names) + (f": {reason}" if reason else "") for reason, names in named.items())


def family_of(op: OpOverload) -> str:
    """The folder of the rule book that an overload's rule stands in; the file, of a family of one file."""
    rule = resolve(op).rule
    if rule is None:
        return ""
    inside = rule.where.rpartition("/ops/")[2]
    return inside.partition("/")[0] if "/" in inside else inside.partition(".")[0]


def _pieces(sample: Sample) -> dict[OpOverload, str] | None:
    """Every operator on the way of a sample, with how it is served; None where plain torch cannot run it."""
    explorer = Explorer()
    for tensor in sample.tensors:
        explorer.note(tensor, True)
    start_random_numbers(0)
    try:
        explorer.run(sample.fn, *sample.args, **sample.kwargs)
    except Exception:
        return explorer.found or None
    return explorer.found


def calls_of(operator: DatabaseOperator, most: int = 40) -> Calls:
    """What an entry of the database calls, by running its samples."""
    name, dtypes = operator.name, operator.dtypes
    samples = operator.samples(operator.preferred_dtype) if dtypes else []
    if not samples:
        return Calls(name, dtypes, note=NOT_ON_THIS_MACHINE)
    with_tensors = [s for s in samples if s.tensors]
    if not with_tensors:
        return Calls(name, dtypes, note=NO_TENSOR)
    runs = [found for s in chosen(with_tensors, most) if (found := _pieces(s)) is not None]
    if not runs:
        return Calls(name, dtypes, note=NOT_ON_THIS_MACHINE)
    ops = dict.fromkeys(op for found in runs for op in found)
    return Calls(name, dtypes, any(len(found) > 1 for found in runs), tuple(ops))


def entry_of(operator: DatabaseOperator, most: int = 40) -> Entry:
    """How an entry of the database is served, by what its samples call."""
    return entry_from(calls_of(operator, most))


def entry_from(calls: Calls) -> Entry:
    """How an entry is served under the present rules, given what it calls."""
    if calls.note:
        return Entry(calls.name, "not applicable", calls.note, "", calls.dtypes)
    pieces = {op: state_of(op) for op in calls.ops}
    families = Counter(f for op in pieces if (f := family_of(op)))
    family = families.most_common(1)[0][0] if families else ""
    for state in ("missing", "refused", "opaque"):
        having = [op for op, s in pieces.items() if s == state]
        if having:
            form = "densifies" if state == "missing" else "refused"
            return Entry(calls.name, state, reasons(having), family, calls.dtypes, form)
    served = [s for s in pieces.values() if s in SERVED]
    if not served:
        return Entry(calls.name, "not applicable", "calls no operator on a tensor", family, calls.dtypes)
    state = "decomposes" if calls.composed or "decomposes" in served else "derived" if "derived" in served else "rule"
    return Entry(calls.name, state, "", family, calls.dtypes, stored_coverage.form_of_all(list(pieces)))


def measure() -> list[Calls]:
    """What every entry of torch's operator database calls, by running its samples: half a minute."""
    with warnings.catch_warnings():
        # Samples of deprecated and experimental operators say so.
        warnings.simplefilter("ignore")
        return [calls_of(operator) for operator in database().values()]


def entries(calls: Iterable[Calls] | None = None) -> Iterator[Entry]:
    """Every entry of torch's operator database; from what is known of their calls if none are given."""
    for each in database_calls.known().values() if calls is None else calls:
        yield entry_from(each)


def core_overloads() -> list[OpOverload]:
    """The aten overloads that torch tags as core and that take a tensor.

    Not sym_size and its like: they ask the wrapper for its geometry, and torch lists them only once they were used.
    """
    found = []
    for name in sorted(n for n in dir(torch.ops.aten) if not n.startswith("sym_")):
        packet = getattr(torch.ops.aten, name, None)
        if not isinstance(packet, torch._ops.OpOverloadPacket):
            continue
        for overload in packet.overloads():
            op = getattr(packet, overload)
            if torch.Tag.core in op.tags and takes_tensor(op):
                found.append(op)
    return found


def core_entries() -> Iterator[Entry]:
    """Every core aten overload."""
    for op in core_overloads():
        state = state_of(op)
        yield Entry(str(op), state, "" if state in SERVED else reasons([op]), family_of(op))


def table(found: Sequence[Entry], title: str) -> str:
    """Counts by family and in total."""
    families: dict[str, Counter[str]] = {}
    for entry in found:
        families.setdefault(entry.family or "-", Counter())[entry.state] += 1
    head = f"{title:16s}" + "".join(f"{state:>15s}" for state in STATES)
    lines = [head]
    lines += [
        f"{family:16s}" + "".join(f"{families[family][state]:15d}" for state in STATES) for family in sorted(families)
    ]
    total = Counter(entry.state for entry in found)
    lines.append(f"{'total ' + str(len(found)):16s}" + "".join(f"{total[state]:15d}" for state in STATES))
    return "\n".join(lines)


# What entries are counted for, dtype by dtype.
DTYPES = ("float32", "float64", "float16", "bfloat16", "complex64", "int64", "int32", "uint8", "bool")


def by_dtype(found: Sequence[Entry]) -> str:
    """For each dtype, how many entries are served of those that take it; by family and in total."""
    families: dict[str, list[Entry]] = {}
    for entry in found:
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
    return "\n".join([*lines, row("total", found)])


def listing(found: Sequence[Entry]) -> str:
    """One line an entry, for the file that tests hold the table to."""
    return "\n".join(str(entry) for entry in sorted(found, key=lambda e: e.name))


def expectation(calls: Iterable[Calls] | None = None) -> str:
    """What tests/report/coverage.expect holds: how each entry and each core overload is served."""
    return f"{listing(list(entries(calls)))}\n\n{listing(list(core_entries()))}"


def report(verbose: bool = False, calls: Sequence[Calls] | None = None) -> str:
    """The whole of `python -m op_registry coverage`; without `calls`, from what is known of them."""
    how = "measured just now" if calls is not None else f"{database_calls.measured_how()}; --measure does so again"
    entries_found, core = list(entries(calls)), list(core_entries())
    served = sum(e.state in SERVED for e in entries_found)
    known, shares = {e.name: e.form for e in entries_found if e.form}, stored_coverage.measured()
    parts = [
        table(entries_found, "family"),
        "",
        by_dtype(entries_found),
        "",
        table(core, "core aten"),
        "",
        stored_coverage.table(known, shares),
        "",
        f"{len(entries_found)} entries of torch's operator database: {served} served as rule, derived or decomposes; "
        f"{len(registry)} overloads have a rule",
        f"what the entries call: {how}",
        f"what stays sparse: {database_calls.measured_how(stored_coverage.MEASURED)}",
    ]
    for state in ("missing", "refused", "not applicable"):
        having = [e for e in [*entries_found, *core] if e.state == state]
        if having:
            parts += ["", f"{state}:", *(f"    {e.name}: {e.note}" for e in having)]
    if verbose:
        parts += ["", listing(entries_found), "", stored_coverage.listing(known, shares)]
    return "\n".join(parts)
