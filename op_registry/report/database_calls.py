"""Which overloads each entry of torch's operator database calls, determined by running its samples.

Running them takes half a minute, and what they call changes only with torch or with a rule for a composite operator. So
it is stored in database.tsv, and ``python -m op_registry coverage`` resolves the stored overloads with the current
rules. ``python -m op_registry coverage --write tests/report/coverage.expect`` measures again and writes both files.
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


def provenance(command: str) -> str:
    """The first line of a measured table: the date, torch's version and the command."""
    return f"# measured on {datetime.date.today()} with torch {torch.__version__.partition('+')[0]}: {command}"


def overload_named(name: str) -> OpOverload | None:
    """The overload called ``aten.add.Tensor``; None if this version of torch does not have it."""
    attribute: object = torch.ops
    for part in name.split("."):
        attribute = getattr(attribute, part, None)
    return attribute if isinstance(attribute, OpOverload) else None


def written(calls: Iterable[Calls], command: str) -> str:
    """The text of the table."""
    lines = [provenance(command), "\t".join(COLUMNS)]
    for entry in sorted(calls, key=lambda c: c.name):
        dtypes = ",".join(sorted(str(d).removeprefix("torch.") for d in entry.dtypes))
        ops = ",".join(map(str, entry.ops))
        lines.append("\t".join([entry.name, dtypes, "yes" if entry.composed else "no", ops, entry.note]))
    return "\n".join(lines) + "\n"


@functools.cache
def known(path: Path = KNOWN) -> Mapping[str, Calls]:
    """The stored table, by entry, without overloads that this version of torch does not have."""
    by_entry = {}
    for line in path.read_text(encoding="utf-8").splitlines()[2:]:
        name, dtypes, composed, ops, note = line.split("\t")
        overloads = (overload_named(op) for op in ops.split(",") if op)
        by_entry[name] = Calls(
            name,
            frozenset(getattr(torch, d) for d in dtypes.split(",") if d),
            composed == "yes",
            tuple(op for op in overloads if op is not None),
            note,
        )
    return by_entry


def measured_how(path: Path = KNOWN) -> str:
    """The first line of a table: when and how it was measured."""
    with path.open(encoding="utf-8") as file:
        return file.readline().removeprefix("# ").strip()
