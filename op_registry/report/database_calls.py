"""Which overloads each entry of torch's operator database calls, as it was found out by running its samples.

To run them takes half a minute, and what they call changes with torch or with a rule for a composite operator only. So
it is kept in database.tsv, and ``python -m op_registry coverage`` asks `resolve` what the rules of today make of it.
``python -m op_registry coverage --write tests/report/coverage.expect`` finds it out anew and writes both files.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._ops import OpOverload

KNOWN = Path(__file__).with_name("database.tsv")
COLUMNS = ("entry", "dtypes", "takes several operators", "overloads", "why not applicable")


@dataclass(frozen=True)
class Calls:
    """What the samples of one entry call.

    name      the entry's name in torch's operator database
    dtypes    those that it takes
    composed  whether one call of it makes several operator calls
    ops       the overloads as they were met; composite ones that have no rule are followed by what they decompose into
    note      why the entry is not applicable, "" if it is
    """

    name: str
    dtypes: frozenset[torch.dtype] = frozenset()
    composed: bool = False
    ops: tuple[OpOverload, ...] = ()
    note: str = ""


def provenance(command: str) -> str:
    """The first line of a table that was measured: when, with which torch, by which command."""
    return f"# measured on {datetime.date.today()} with torch {torch.__version__.partition('+')[0]}: {command}"


def overload_named(name: str) -> OpOverload | None:
    """``aten.add.Tensor`` as an overload; None where this torch has none of that name."""
    found: object = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, OpOverload) else None


def written(calls: Iterable[Calls], command: str) -> str:
    """The table, as it is kept."""
    lines = [provenance(command), "\t".join(COLUMNS)]
    for entry in sorted(calls, key=lambda c: c.name):
        dtypes = ",".join(sorted(str(d).removeprefix("torch.") for d in entry.dtypes))
        ops = ",".join(map(str, entry.ops))
        lines.append("\t".join([entry.name, dtypes, "yes" if entry.composed else "no", ops, entry.note]))
    return "\n".join(lines) + "\n"


@functools.cache
def known(path: Path = KNOWN) -> Mapping[str, Calls]:
    """The table as it was measured, by entry. Overloads that this torch does not have are left out."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines()[2:]:
        name, dtypes, composed, ops, note = line.split("\t")
        overloads = (overload_named(op) for op in ops.split(",") if op)
        found[name] = Calls(
            name,
            frozenset(getattr(torch, d) for d in dtypes.split(",") if d),
            composed == "yes",
            tuple(op for op in overloads if op is not None),
            note,
        )
    return found


def measured_how(path: Path = KNOWN) -> str:
    """When and how a table was measured: its first line."""
    with path.open(encoding="utf-8") as file:
        return file.readline().removeprefix("# ").strip()
