"""Format a trace as text: one line for each call, indented by module."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from masked_dispatch.seeing.calls import Call, Operand, innermost

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


def table(calls: Sequence[Call], notes: Iterable[str], times: bool, depth: int | None = None) -> str:
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


def path(calls: Sequence[Call], sources: Sequence[Operand]) -> str:
    """Format the calls of a path, starting from its sources."""
    if not calls:
        return "a source: no call of the trace made it"
    lines = ["sources: " + ", ".join(_source(source) for source in sources)]
    return "\n".join([*lines, *(f"{call.number:4}  {call}" for call in calls)])


def _source(operand: Operand) -> str:
    return f"{operand.name} of shape {operand.shape} ({operand})"
