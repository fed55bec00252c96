"""How well entries of torch's database are supported on each storage, according to their rules and to measurements.

A sparse form of an operator may not support all of its calls. So a table stores how many of an entry's trials never
needed dense storage, measured by P4 on the quick tier's samples::

    python -m op_registry check --law P4 --table-of-storages op_registry/report/sparse_coverage.tsv

From both, an entry is, in each layout, one of

    own kernel   every trial stayed sparse, and a rule that it calls has its own sparse form
    generic      every trial stayed sparse, through the generic forms of its rules' categories
    in part      some trials stayed sparse, others were converted to dense storage
    densifies    every trial was converted to dense storage
    refused      refused on dense storage too, or on this one
    not tried    no sample can be stored in this layout
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch._ops import OpOverload

from op_registry.laws.categories import COMPOSITE
from op_registry.report.database_calls import provenance
from op_registry.resolve import resolve
from op_registry.sparse.by_rows import ON_STORED_ROWS
from op_registry.sparse.contraction import BY_ELEMENTS, BY_EQUATION
from op_registry.sparse.elementwise import ON_VALUES
from op_registry.sparse.lowering import alternatives
from op_registry.sparse.record import Sparse
from op_registry.sparse.slicewise import ON_DENSE_DIMS, ON_PADDED_ROWS

LAYOUTS = ("coo", "csr", "csc", "bsr", "bsc", "hybrid", "packed")
STATES = ("own kernel", "generic", "in part", "densifies", "refused", "not tried")
MEASURED = Path(__file__).with_name("sparse_coverage.tsv")
COMMAND = "python -m op_registry check --law P4 --table-of-storages op_registry/report/sparse_coverage.tsv"

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


def measured(path: Path = MEASURED) -> dict[str, dict[str, tuple[int, int, int]]]:
    """The stored table."""
    _, head, *lines = path.read_text(encoding="utf-8").splitlines()
    layouts = head.split("\t")[1:]
    shares = {}
    for line in lines:
        name, *cells = line.split("\t")
        shares[name] = {layout: _share(cell) for layout, cell in zip(layouts, cells, strict=True)}
    return shares


def _share(cell: str) -> tuple[int, int, int]:
    stayed, ran, refused = cell.split("/")
    return int(stayed), int(ran), int(refused)


def written(shares: Shares) -> str:
    """The text of the table: when and how it was measured, the columns, and a row for each entry."""
    lines = [provenance(COMMAND), "\t".join(["stayed sparse/ran/refused", *LAYOUTS])]
    for name in sorted(shares):
        cells = ("/".join(map(str, shares[name].get(layout, (0, 0, 0)))) for layout in LAYOUTS)
        lines.append("\t".join([name, *cells]))
    return "\n".join(lines)


def state(known: str, share: tuple[int, int, int]) -> str:
    """One of STATES, from the form of an entry (`known`) and the measured share of its trials."""
    stayed, ran, refused = share
    if not ran:
        return "refused" if refused or known == "refused" else "not tried"
    if stayed == ran:
        return "own kernel" if known == "own kernel" else "generic"
    return "in part" if stayed else "densifies"


def table(known: Mapping[str, str], shares: Shares) -> str:
    """The number of entries in each state, for each layout."""
    counts = {layout: Counter(_states(known, shares, layout)) for layout in LAYOUTS}
    lines = [f"{'stored as':16s}" + "".join(f"{layout:>9s}" for layout in LAYOUTS)]
    lines += [f"{s:16s}" + "".join(f"{counts[layout][s]:9d}" for layout in LAYOUTS) for s in STATES]
    return "\n".join(lines)


def _states(known: Mapping[str, str], shares: Shares, layout: str) -> list[str]:
    return [state(entry_form, shares.get(name, {}).get(layout, (0, 0, 0))) for name, entry_form in known.items()]


def listing(known: Mapping[str, str], shares: Shares) -> str:
    """One line for each entry: its state in each layout; for "in part", with the share of trials that stayed sparse."""
    lines = []
    for name in sorted(known):
        cells = []
        for layout in LAYOUTS:
            share = shares.get(name, {}).get(layout, (0, 0, 0))
            in_layout = state(known[name], share)
            cells.append(f"{layout} {in_layout}" + (f" ({share[0]} of {share[1]})" if in_layout == "in part" else ""))
        lines.append(f"{name}: {', '.join(cells)}")
    return "\n".join(lines)
