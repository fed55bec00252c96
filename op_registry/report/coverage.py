"""Which operators are supported, and how, according to `resolve`, which dispatch uses too.

Each entry of torch's operator database, and each core aten overload, is one of

    rule            has its own rule
    derived         follows the rule of its functional or single-tensor form
    decomposes      decomposes in torch, in Python or C++, into operators that are all supported (found by running it)
    opaque          supported if every element is valid, refused otherwise
    refused         refused, for a stated reason
    not applicable  has no tensor to mask, or does not run on this machine
    missing         the operator, or one that it decomposes into, has no rule

Two tables are measured and stored, since running torch's samples takes time: which overloads each entry calls, and how
many of its trials stay sparse in each layout.
"""

from __future__ import annotations

import datetime
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.conformance.plain_torch import Interpreter
from op_registry.conformance.sample import start_random_numbers, tree_leaves
from op_registry.conformance.samples import NO_TENSOR, NOT_ON_THIS_MACHINE, DatabaseOperator, Sample, chosen, database
from op_registry.laws.categories import COMPOSITE
from op_registry.progress import progress
from op_registry.registry import registry
from op_registry.report.names import operator_named
from op_registry.resolve import resolve
from op_registry.rule import takes_tensor
from op_registry.schema import single_form
from op_registry.sparse.contraction import BY_ELEMENTS, BY_EQUATION
from op_registry.sparse.lowering import alternatives
from op_registry.sparse.on_values import ON_STORED_ROWS, ON_VALUES
from op_registry.sparse.record import Sparse
from op_registry.sparse.slicewise import ON_DENSE_DIMS, ON_PADDED_ROWS

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
    # The least sparse form of what it calls, see `form`.
    form: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.state}{f' ({self.note})' if self.note else ''}"


def entries(calls: Iterable[Calls] | None = None) -> Iterator[Entry]:
    """Every entry of torch's operator database, from `calls` or from the stored table of calls."""
    for entry_calls in known_calls().values() if calls is None else calls:
        yield entry_from(entry_calls)


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
    return Entry(calls.name, state, "", family, calls.dtypes, form_of_all(list(pieces)))


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
    rules = ((op, resolve(op).rule) for op in sorted(ops, key=str))
    by_reason = grouped((rule.traits.reason if rule is not None else "", str(op)) for op, rule in rules)
    return "; ".join(", ".join(names) + (f": {reason}" if reason else "") for reason, names in by_reason.items())


def family_of(op: OpOverload) -> str:
    """The family of an overload's rule: its folder in op_registry/ops, or its file if the family is a single file."""
    rule = resolve(op).rule
    if rule is None:
        return ""
    inside = rule.where.rpartition("/ops/")[2]
    return inside.partition("/")[0] if "/" in inside else inside.partition(".")[0]


def core_entries() -> Iterator[Entry]:
    """Every core aten overload."""
    for op in core_overloads():
        state = state_of(op)
        yield Entry(str(op), state, "" if state in SERVED else reasons([op]), family_of(op))


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


# -------------------------------------------------------------------------------------------------------------- reports


def report(verbose: bool = False, calls: Sequence[Calls] | None = None) -> str:
    """The output of `python -m op_registry coverage`, from `calls` or from the stored table of calls."""
    how = "measured just now" if calls is not None else f"{measured_how()}; --measure runs it again"
    in_database, core = list(entries(calls)), list(core_entries())
    served = sum(e.state in SERVED for e in in_database)
    known, shares = {e.name: e.form for e in in_database if e.form}, measured_shares()
    parts = [
        table(in_database, "family"),
        "",
        by_dtype(in_database),
        "",
        table(core, "core aten"),
        "",
        table_of_storages(known, shares),
        "",
        f"{len(in_database)} entries of torch's operator database: {served} served as rule, derived or decomposes; "
        f"{len(registry)} overloads have a rule",
        f"what the entries call: {how}",
        f"what stays sparse: {measured_how(SHARES)}",
    ]
    for state in ("missing", "refused", "not applicable"):
        in_state = [e for e in [*in_database, *core] if e.state == state]
        if in_state:
            parts += ["", f"{state}:", *(f"    {e.name}: {e.note}" for e in in_state)]
    if verbose:
        parts += ["", listing(in_database), "", listing_of_storages(known, shares)]
    return "\n".join(parts)


def table(entries: Sequence[Entry], title: str, states: Sequence[str] = STATES) -> str:
    """Counts by family and in total."""

    def count(entries: Sequence[Entry], state: str) -> str:
        return str(sum(entry.state == state for entry in entries))

    of_family = [(entry.family, entry) for entry in entries]
    return by_family(of_family, (title, *states), count, f"total {len(entries)}").text(15)


# The dtypes for which entries are counted.
DTYPES = ("float32", "float64", "float16", "bfloat16", "complex64", "int64", "int32", "uint8", "bool")


def by_dtype(entries: Sequence[Entry]) -> str:
    """For each dtype, how many of the entries that take it are supported, by family and in total."""

    def served(entries: Sequence[Entry], dtype: str) -> str:
        taking = [e for e in entries if getattr(torch, dtype) in e.dtypes and e.state != "not applicable"]
        return f"{sum(e.state in SERVED for e in taking)} of {len(taking)}" if taking else ""

    of_family = [(entry.family, entry) for entry in entries]
    return by_family(of_family, ("served, by dtype", *DTYPES), served, "total").text(12)


def as_values(calls: Sequence[Calls] | None) -> dict[str, Any]:
    """The same as values."""

    def fields(entry: Entry) -> dict[str, Any]:
        dtypes = sorted(str(dtype).removeprefix("torch.") for dtype in entry.dtypes)
        values = {"name": entry.name, "state": entry.state, "note": entry.note, "family": entry.family}
        return values | ({"form": entry.form, "dtypes": dtypes} if dtypes else {})

    return {
        "rules": len(registry),
        "measured": measured_how() if calls is None else "just now",
        "database": [fields(entry) for entry in entries(calls)],
        "core": [fields(entry) for entry in core_entries()],
    }


def listing(entries: Sequence[Entry]) -> str:
    """One line for each entry, as in the file that tests compare with (tests/report/coverage.expect)."""
    return "\n".join(str(entry) for entry in sorted(entries, key=lambda e: e.name))


def expectation(calls: Iterable[Calls] | None = None) -> str:
    """The content of tests/report/coverage.expect: how each entry and each core overload is supported."""
    return f"{listing(list(entries(calls)))}\n\n{listing(list(core_entries()))}"


# --------------------------------------------------- what an entry calls: determined by running its samples, and stored

# Running them takes half a minute, and what they call changes only with torch or with a rule for a composite operator.
# So it is stored in database.tsv, and ``python -m op_registry coverage`` resolves the stored overloads with the current
# rules. ``python -m op_registry coverage --write tests/report/coverage.expect`` measures again and writes both files.


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


def measure() -> list[Calls]:
    """What every entry of torch's operator database calls, determined by running its samples. Takes half a minute."""
    with warnings.catch_warnings():
        # Samples of deprecated and experimental operators warn.
        warnings.simplefilter("ignore")
        operators = database().values()
        return [calls_of(operator) for operator in progress(operators, len(operators), "entry")]


KNOWN = Path(__file__).with_name("database.tsv")
COLUMNS = ("entry", "dtypes", "takes several operators", "overloads", "why not applicable")


@dataclass(frozen=True)
class Calls:
    """What the samples of one entry call.

    name      the entry's name in torch's operator database
    dtypes    the dtypes that it takes
    composed  whether one sample calls several operators
    ops       the overloads, in order; a composite one without a rule is followed by those that it decomposes into
    note      why the entry is not applicable; "" if it is
    """

    name: str
    dtypes: frozenset[torch.dtype] = frozenset()
    composed: bool = False
    ops: tuple[OpOverload, ...] = ()
    note: str = ""


def table_of_calls(calls: Iterable[Calls], command: str) -> str:
    """The text of the table."""
    rows = []
    for entry in sorted(calls, key=lambda c: c.name):
        dtypes = ",".join(sorted(str(d).removeprefix("torch.") for d in entry.dtypes))
        ops = ",".join(map(str, entry.ops))
        rows.append((entry.name, dtypes, "yes" if entry.composed else "no", ops, entry.note))
    return Table(COLUMNS, rows).tsv(command)


@functools.cache
def known_calls(path: Path = KNOWN) -> Mapping[str, Calls]:
    """The stored table, by entry, without overloads that this version of torch does not have."""
    by_entry = {}
    for name, dtypes, composed, ops, note in Table.read(path).rows:
        overloads = (operator_named(op) for op in ops.split(",") if op)
        by_entry[name] = Calls(
            name,
            frozenset(getattr(torch, d) for d in dtypes.split(",") if d),
            composed == "yes",
            tuple(op for op in overloads if isinstance(op, OpOverload)),
            note,
        )
    return by_entry


def measured_how(path: Path = KNOWN) -> str:
    """The first line of a table: when and how it was measured."""
    with path.open(encoding="utf-8") as file:
        return file.readline().removeprefix("# ").strip()


# ---------------------------------------------------------------------------- which entries stay sparse, in each layout

# A sparse form of an operator may not support all of its calls. So a table stores how many of an entry's trials never
# needed dense storage, measured by P4 on the quick tier's samples (COMMAND_OF_SHARES). From both, an entry is, in each
# layout, one of
#
#     own kernel   every trial stayed sparse, and a rule that it calls has its own sparse form
#     generic      every trial stayed sparse, through the generic forms of its rules' categories
#     in part      some trials stayed sparse, others were converted to dense storage
#     densifies    every trial was converted to dense storage
#     refused      refused on dense storage too, or on this one
#     not tried    no sample can be stored in this layout

LAYOUTS = ("coo", "csr", "csc", "bsr", "bsc", "hybrid", "packed")
STATES_OF_STORAGE = ("own kernel", "generic", "in part", "densifies", "refused", "not tried")
SHARES = Path(__file__).with_name("sparse_coverage.tsv")
COMMAND_OF_SHARES = "python -m op_registry check --law P4 --table-of-storages op_registry/report/sparse_coverage.tsv"

SUMS = (BY_EQUATION, ON_STORED_ROWS, BY_ELEMENTS)
# The generic forms, shared by the rules of a category.
SHARED = tuple(lowering.run for lowering in (ON_VALUES, *SUMS, ON_DENSE_DIMS, ON_PADDED_ROWS))

# By entry and layout: the number of trials that stayed sparse, that ran, and that were refused.
Shares = Mapping[str, Mapping[str, tuple[int, int, int]]]


def form(op: OpOverload) -> str:
    """Where an overload's sparse form comes from, if it has one; "" if that depends on what it decomposes into."""
    rule = resolve(op).rule
    if rule is None or rule.category is COMPOSITE:
        return ""
    if rule.category.name in ("refused", "opaque"):
        return "refused"
    ways = alternatives(rule, Sparse)
    if any(way not in SHARED for way in ways):
        return "own kernel"
    return "generic" if ways else "densifies"


def form_of_all(ops: Sequence[OpOverload]) -> str:
    """The least sparse form of an entry that calls these overloads."""
    forms = {form(op) for op in ops}
    return next((f for f in ("refused", "densifies", "own kernel", "generic") if f in forms), "generic")


def measured_shares(path: Path = SHARES) -> dict[str, dict[str, tuple[int, int, int]]]:
    """The stored table."""
    table = Table.read(path)
    shares = {}
    for name, *cells in table.rows:
        counts = (tuple(map(int, cell.split("/"))) for cell in cells)
        in_layouts = zip(table.head[1:], counts, strict=True)
        shares[name] = {layout: (stayed, ran, refused) for layout, (stayed, ran, refused) in in_layouts}
    return shares


def table_of_shares(shares: Shares) -> str:
    """The text of the table: when and how it was measured, the columns, and a row for each entry."""
    rows = [(name, *("/".join(map(str, _share(shares, name, la))) for la in LAYOUTS)) for name in sorted(shares)]
    return Table(("stayed sparse/ran/refused", *LAYOUTS), rows).tsv(COMMAND_OF_SHARES)


def state_of_storage(known: str, share: tuple[int, int, int]) -> str:
    """One of STATES_OF_STORAGE, from the form of an entry (`known`) and the measured share of its trials."""
    stayed, ran, refused = share
    if not ran:
        return "refused" if refused or known == "refused" else "not tried"
    if stayed == ran:
        return "own kernel" if known == "own kernel" else "generic"
    return "in part" if stayed else "densifies"


def table_of_storages(known: Mapping[str, str], shares: Shares) -> str:
    """The number of entries in each state, for each layout."""
    counts = {
        layout: Counter(state_of_storage(form, _share(shares, name, layout)) for name, form in known.items())
        for layout in LAYOUTS
    }
    rows = [(state, *(str(counts[layout][state]) for layout in LAYOUTS)) for state in STATES_OF_STORAGE]
    return Table(("stored as", *LAYOUTS), rows).text(9)


def _share(shares: Shares, name: str, layout: str) -> tuple[int, int, int]:
    """How many trials of an entry stayed sparse, ran and were refused; none if it is not in the table."""
    return shares.get(name, {}).get(layout, (0, 0, 0))


def listing_of_storages(known: Mapping[str, str], shares: Shares) -> str:
    """One line for each entry: its state in each layout; for "in part", with the share of trials that stayed sparse."""
    lines = []
    for name in sorted(known):
        cells = []
        for layout in LAYOUTS:
            share = _share(shares, name, layout)
            in_layout = state_of_storage(known[name], share)
            cells.append(f"{layout} {in_layout}" + (f" ({share[0]} of {share[1]})" if in_layout == "in part" else ""))
        lines.append(f"{name}: {', '.join(cells)}")
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------- a table, and its faces

Item = TypeVar("Item")


@dataclass(frozen=True)
class Table:
    """Rows of cells; the first cell of a row names it. It is printed, or measured and stored."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def text(self, width: int) -> str:
        """In columns: names to the left, cells of this width to the right."""
        rows = (self.head, *self.rows)
        return "\n".join(f"{name:16s}" + "".join(f"{cell:>{width}s}" for cell in cells) for name, *cells in rows)

    def markdown(self) -> str:
        rows = [f"| {' | '.join(row)} |" for row in (self.head, *self.rows)]
        return "\n".join([rows[0], "|---" * len(self.head) + "|", *rows[1:]])

    def tsv(self, command: str) -> str:
        """With tabs, below a line that says when, with which torch and by which command it was measured."""
        how = f"# measured on {datetime.date.today()} with torch {torch.__version__.partition('+')[0]}: {command}"
        return "\n".join([how, *("\t".join(row) for row in (self.head, *self.rows))]) + "\n"

    @classmethod
    def read(cls, path: Path) -> Table:
        """A table that was stored so."""
        _, head, *rows = (line.split("\t") for line in path.read_text(encoding="utf-8").splitlines())
        return cls(head, rows)


def grouped(items: Iterable[tuple[str, Item]]) -> dict[str, list[Item]]:
    """The items of each group, in order, by the group's name."""
    groups: dict[str, list[Item]] = {}
    for name, item in items:
        groups.setdefault(name, []).append(item)
    return groups


def by_family(
    items: Iterable[tuple[str, Item]], head: Sequence[str], cell: Callable[[Sequence[Item], str], str], total: str
) -> Table:
    """A row for each family of items, and one for all. `cell` makes a cell of some items in a column of `head`."""
    families = grouped((family or "-", item) for family, item in items)
    groups = [*sorted(families.items()), (total, [item for family in families.values() for item in family])]
    return Table(head, [(name, *(cell(group, column) for column in head[1:])) for name, group in groups])
