"""How entries of torch's database fare on each storage: what is known of their rules, and what was measured.

That an operator has a sparse form says nothing about which calls it takes. So there is a table of how many of an
entry's trials never had to be stored densely, made by P4 on the quick tier's samples::

    python -m op_registry check --law P4 --table-of-storages op_registry/report/sparse_coverage.tsv

With it an entry is, in each layout, one of

    own kernel   every trial stayed sparse, and a rule on the way has a sparse form of its own
    generic      every trial stayed sparse by what the categories of its rules do
    in part      some calls stayed sparse, others were stored densely
    densifies    every trial was stored densely
    refused      refused on dense storage already, or on this one
    not tried    nothing was there to store
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch._ops import OpOverload

from op_registry.categories import COMPOSITE
from op_registry.report.database_calls import provenance
from op_registry.resolve import resolve
from op_registry.sparse.elementwise import ON_VALUES
from op_registry.sparse.lowering import alternatives
from op_registry.sparse.record import Sparse
from op_registry.sparse.slicewise import ON_DENSE_DIMS, ON_PADDED_ROWS

LAYOUTS = ("coo", "csr", "csc", "bsr", "bsc", "hybrid", "packed")
STATES = ("own kernel", "generic", "in part", "densifies", "refused", "not tried")
MEASURED = Path(__file__).with_name("sparse_coverage.tsv")
COMMAND = "python -m op_registry check --law P4 --table-of-storages op_registry/report/sparse_coverage.tsv"

# What rules of a category share.
SHARED = tuple(lowering.run for lowering in (ON_VALUES, ON_DENSE_DIMS, ON_PADDED_ROWS))

# By entry, then by layout: trials that stayed sparse, trials that ran, trials that were refused.
Shares = Mapping[str, Mapping[str, tuple[int, int, int]]]


def form(op: OpOverload) -> str:
    """Where an overload's sparse form comes from, if it has one; "" where its pieces have to be asked."""
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
    """The same for an entry that calls these overloads: the least of them."""
    forms = {form(op) for op in ops}
    return next((f for f in ("refused", "densifies", "own kernel", "generic") if f in forms), "generic")


def measured(path: Path = MEASURED) -> dict[str, dict[str, tuple[int, int, int]]]:
    """The table as it was made."""
    _, head, *lines = path.read_text(encoding="utf-8").splitlines()
    layouts = head.split("\t")[1:]
    found = {}
    for line in lines:
        name, *cells = line.split("\t")
        found[name] = {layout: _share(cell) for layout, cell in zip(layouts, cells, strict=True)}
    return found


def _share(cell: str) -> tuple[int, int, int]:
    stayed, ran, refused = cell.split("/")
    return int(stayed), int(ran), int(refused)


def written(shares: Shares) -> str:
    """The table, as it is kept: when and how it was measured, the columns, and a line for each entry."""
    lines = [provenance(COMMAND), "\t".join(["stayed sparse/ran/refused", *LAYOUTS])]
    for name in sorted(shares):
        cells = ("/".join(map(str, shares[name].get(layout, (0, 0, 0)))) for layout in LAYOUTS)
        lines.append("\t".join([name, *cells]))
    return "\n".join(lines)


def state(known: str, share: tuple[int, int, int]) -> str:
    """One of STATES: from what is known of an entry's rules, and what its trials came to."""
    stayed, ran, refused = share
    if not ran:
        return "refused" if refused or known == "refused" else "not tried"
    if stayed == ran:
        return "own kernel" if known == "own kernel" else "generic"
    return "in part" if stayed else "densifies"


def table(known: Mapping[str, str], shares: Shares) -> str:
    """How many entries are in which state, in each layout."""
    counts = {layout: Counter(_states(known, shares, layout)) for layout in LAYOUTS}
    lines = [f"{'stored as':16s}" + "".join(f"{layout:>9s}" for layout in LAYOUTS)]
    lines += [f"{s:16s}" + "".join(f"{counts[layout][s]:9d}" for layout in LAYOUTS) for s in STATES]
    return "\n".join(lines)


def _states(known: Mapping[str, str], shares: Shares, layout: str) -> list[str]:
    return [state(word, shares.get(name, {}).get(layout, (0, 0, 0))) for name, word in known.items()]


def listing(known: Mapping[str, str], shares: Shares) -> str:
    """One line an entry: its state in each layout, with the share of trials that stayed sparse where that is a part."""
    lines = []
    for name in sorted(known):
        cells = []
        for layout in LAYOUTS:
            share = shares.get(name, {}).get(layout, (0, 0, 0))
            found = state(known[name], share)
            cells.append(f"{layout} {found}" + (f" ({share[0]} of {share[1]})" if found == "in part" else ""))
        lines.append(f"{name}: {', '.join(cells)}")
    return "\n".join(lines)
