"""The record of a call, and how records print: numbers and names, never a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from masked_dispatch.densification import Densification

Kind = Literal["operator", "module", "compiled region"]


@dataclass(frozen=True)
class Operand:
    """A tensor that took part in a call.

    name     the argument's name, "result" for a result
    masked   whether it is a masked tensor; a plain one is valid everywhere
    shape, dtype
    storage  "dense", "coo", "csr", "packed" …; "packed, permuted" if it shows its dimensions in another order
    valid    number of valid elements; None if the tensor has no readable values (under vmap, on meta, in a graph)
    numel    number of elements
    source   numbers of the call that made it and the call that last wrote to its memory; () if no call did
    """

    name: str
    masked: bool
    shape: tuple[int, ...]
    dtype: str
    storage: str
    valid: int | None
    numel: int
    source: tuple[int, ...] = ()

    @property
    def share(self) -> float | None:
        """Return the share of valid elements; 1.0 for an empty tensor."""
        if self.valid is None:
            return None
        return self.valid / self.numel if self.numel else 1.0

    def __str__(self) -> str:
        if not self.masked:
            return "plain"
        if self.valid is None or self.share is None:
            return f"?/{self.numel}"
        return f"{self.valid}/{self.numel} {percent(self.share)}"


def percent(share: float) -> str:
    """Format a share as a percentage; only exact 0 and 1 become 0% and 100%."""
    rounded = round(100 * share)
    if rounded == 100 and share < 1:
        return ">99%"
    return "<1%" if rounded == 0 and share > 0 else f"{rounded}%"


@dataclass(frozen=True)
class Change:
    """The effect of a call on validity.

    lost, grown  whether elements became invalid, or valid
    lost_elements, grown_elements  their number; None if result and operands do not have the same positions, so the
                 trace only compares their shares
    """

    lost: bool = False
    grown: bool = False
    lost_elements: int | None = None
    grown_elements: int | None = None


@dataclass(repr=False)
class Call:
    """One call of an operator or a module.

    number     its position in the trace
    name       the overload, as torch prints it, or the module's name in its model and its class
    kind       "operator", "module" or "compiled region"
    rule       the category of the operator's rule, or another way in which it runs; "" for a module
    parent     the number of the module or composite operator that made the call, or None
    depth      the number of calls around it
    backward   whether the autograd engine made it
    operands, results  the tensors, in order
    change     the elements that became invalid or valid
    densified  the tensors that the call densified, and the reasons
    seconds    its time with the calls it made, without the time for counting; host time, even on a device
    error      the error that it raised, or ""
    """

    number: int
    name: str
    kind: Kind
    rule: str = ""
    parent: int | None = None
    depth: int = 0
    backward: bool = False
    operands: tuple[Operand, ...] = ()
    results: tuple[Operand, ...] = ()
    change: Change = field(default_factory=Change)
    densified: tuple[Densification, ...] = ()
    seconds: float = 0.0
    error: str = ""

    @property
    def masked_operands(self) -> tuple[Operand, ...]:
        """Return the masked operands."""
        return tuple(operand for operand in self.operands if operand.masked)

    @property
    def storage(self) -> str:
        """Return the storage of its masked operands and results: "csr", or "csr → dense"."""
        before = _storages(self.masked_operands)
        after = _storages(tuple(result for result in self.results if result.masked))
        return f"{before} -> {after}" if after and before and after != before else before or after

    def __str__(self) -> str:
        before = ", ".join(map(str, self.masked_operands)) or "plain"
        after = ", ".join(map(str, self.results)) or "nothing"
        marks = [self.rule, self.storage, *self.marks]
        return f"{self.name}: {before} -> {after} ({'; '.join(mark for mark in marks if mark)})"

    __repr__ = __str__

    @property
    def marks(self) -> list[str]:
        """Return the remarks on the call, in words."""
        change, marks = self.change, []
        if change.lost:
            marks.append("lost" if change.lost_elements is None else f"lost {change.lost_elements}")
        if change.grown:
            marks.append("grown" if change.grown_elements is None else f"grown {change.grown_elements}")
        marks += ["stored densely"] if self.densified else []
        marks += ["backward"] if self.backward else []
        marks += [f"raised {self.error.partition(':')[0]}"] if self.error else []
        return marks


def innermost(calls: Iterable[Call]) -> tuple[Call, ...]:
    """Drop calls that made other calls in the list: a composite operator is represented by its inner calls."""
    calls = tuple(calls)
    parents = {call.parent for call in calls}
    return tuple(call for call in calls if call.number not in parents)


def _storages(operands: tuple[Operand, ...]) -> str:
    return " and ".join(dict.fromkeys(operand.storage for operand in operands))


# ------------------------------------------------------------------ as text: one line for each call, indented by module

HEADINGS = ("call", "valid in", "valid out", "rule", "storage", "", "time")


def summary(calls: Sequence[Call]) -> str:
    """Summarize a trace in one line."""
    operators = [call for call in calls if call.kind == "operator"]
    modules = [call for call in calls if call.kind == "module"]
    backward = sum(call.backward for call in operators)
    densely = sum(bool(call.densified) for call in calls)
    parts = [
        counted(len(operators), "operator call") + (f" ({backward} in backward)" if backward else ""),
        counted(len(modules), "module call") if modules else "",
        f"validity lost in {len(innermost(call for call in operators if call.change.lost))}",
        f"grown in {len(innermost(call for call in operators if call.change.grown))}",
        f"stored densely in {densely}" if densely else "",
    ]
    return ", ".join(part for part in parts if part)


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def text_of_trace(calls: Sequence[Call], notes: Iterable[str], times: bool, depth: int | None = None) -> str:
    """Return the summary, a line for each call of the first `depth` levels, and the densifications with reasons."""
    lines = [f"trace: {summary(calls)}", *(f"  ({note})" for note in notes)]
    if not calls:
        return "\n".join([*lines, "  nothing was called with a masked tensor"])
    calls = [call for call in calls if depth is None or call.depth < depth]
    rows: list[tuple[Call | None, tuple[str, ...]]] = [(None, HEADINGS)]
    rows += [(call, cells(call)) for call in calls if call.kind != "compiled region"]
    width = [max(len(row[column]) for _, row in rows) for column in range(len(HEADINGS))]
    printed = {call.number if call else -1: _line(row, width, times) for call, row in rows}
    lines.append(printed[-1])
    for call in calls:
        lines.append(printed.get(call.number) or f"{'  ' * call.depth}{call.name}")
        lines += [f"{'  ' * (call.depth + 2)}stores densely: {d}" for d in call.densified]
    return "\n".join(lines)


def _line(row: Sequence[str], width: Sequence[int], times: bool) -> str:
    shown = [cell.ljust(size) for cell, size in zip(row, width, strict=True)]
    shown[-1] = row[-1].rjust(width[-1])
    return "  ".join(cell for cell, size in zip(shown[: None if times else -1], width, strict=False) if size).rstrip()


def cells(call: Call) -> tuple[str, ...]:
    """Return the columns of a call, as in `HEADINGS`."""
    return (
        f"{'  ' * call.depth}{call.name}",
        ", ".join(map(str, call.masked_operands)) or "plain",
        ", ".join(map(str, call.results)) or "-",
        call.rule or call.kind,
        call.storage,
        ", ".join(call.marks),
        duration(call.seconds),
    )


def duration(seconds: float) -> str:
    """Format a time in milliseconds or seconds."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.2f} ms"


def text_of_path(calls: Sequence[Call], sources: Sequence[Operand]) -> str:
    """Format the calls of a path, starting from its sources."""
    if not calls:
        return "a source: no call of the trace made it"
    lines = ["sources: " + ", ".join(_source(source) for source in sources)]
    return "\n".join([*lines, *(f"{call.number:4}  {call}" for call in calls)])


def _source(operand: Operand) -> str:
    return f"{operand.name} of shape {operand.shape} ({operand})"
