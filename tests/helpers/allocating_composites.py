"""Which composites of torch allocate memory: operators that decompose, and functions that torch writes in Python.

``python tests/helpers/allocating_composites.py > tests/conformance/allocating_composites.expect`` writes the list.

A composite that allocates a plain buffer and writes a masked tensor into it loses the mask. They are found by running
samples of everything, and noting the factories that are called from inside.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from torch._ops import OpOverload

from op_registry.conformance import python_level as names
from op_registry.conformance.plain_torch import Interpreter
from op_registry.conformance.sample import Sample, chosen
from op_registry.conformance.samples import database
from op_registry.report import python_level
from op_registry.resolve import resolve

# Stands for what an entry of the database, which is no part of torch itself, allocates.
ENTRY = "entry"
KINDS = ("empty", "zeros", "ones", "full")
FACTORIES = frozenset(
    [f"{prefix}{kind}{suffix}" for kind in KINDS for prefix, suffix in (("", ""), ("", "_like"), ("new_", ""))]
    + ["empty_strided", "new_empty_strided", "empty_permuted", "resize_"]
)


class Allocations(Interpreter):
    """Runs a call, and notes which factories are called by which composite, the innermost one."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.inside = [name]
        self.found: dict[str, set[str]] = {}

    def evaluate(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = op._schema.name.removeprefix("aten::")
        if name in FACTORIES:
            self.found.setdefault(self.inside[-1], set()).add(name)
        elif resolve(op).kind == "decomposes":
            self.inside.append(str(op))
            try:
                return self.decompose(op, args, kwargs)
            finally:
                self.inside.pop()
        return op(*args, **kwargs)


def note_samples(found: dict[str, set[str]], name: str, samples: Iterable[Sample]) -> None:
    """Add the factories that are called by each composite in these calls; `name` is that of the function itself."""
    for sample in samples:
        allocations = Allocations(name)
        try:
            allocations.run(sample.fn, *sample.args, **sample.kwargs)
        except Exception:  # plain torch does not run it on this machine
            continue
        for composite, factories in allocations.found.items():
            found.setdefault(composite, set()).update(factories)


def everything(most: int = 2) -> dict[str, set[str]]:
    """Of every entry of the database, and of every function that torch writes in Python."""
    found: dict[str, set[str]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for entry in database().values():
            note_samples(found, ENTRY, chosen(entry.samples(entry.preferred_dtype), most) if entry.dtypes else [])
        for name in names.all_names():
            if not python_level.reason_not_called(name):
                note_samples(found, full_name(name), python_level.samples_of(name)[:most])
    found.pop(ENTRY, None)
    return found


def full_name(name: str) -> str:
    """The name of a callable of the trial, as it is written after ``import torch``."""
    return name if name.startswith("torch.") else f"torch.{name}"


def table() -> str:
    """A line for each composite: its name, and the factories that it calls."""
    return "".join(f"{name}: {' '.join(sorted(made))}\n" for name, made in sorted(everything().items()))


if __name__ == "__main__":
    print(table(), end="")
