"""Tables and progress bars, on a terminal and in a log alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

console = Console(width=None if Console().is_terminal else 120, highlight=False)


def title(text: str) -> None:
    console.print()
    console.rule(f"[bold]{text}")


def say(text: str) -> None:
    console.print(text)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], caption: str = "") -> None:
    """A table, its first column aligned left and the others right."""
    made = Table(caption=caption or None, caption_justify="left")
    for i, column in enumerate(columns):
        made.add_column(column, justify="right" if i else "left")
    for row in rows:
        made.add_row(*(cell if isinstance(cell, str) else number(cell) for cell in row))
    console.print(made)


def number(value: object) -> str:
    """A number with five significant digits; None as a dash."""
    if value is None:
        return "–"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


class Bar:
    """A progress bar with a label that changes."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total)

    def label(self, text: str) -> None:
        self._progress.update(self._task, description=text)
        if not console.is_terminal:  # a log shows no bar before it is full
            console.print(f"{text} …")

    def advance(self) -> None:
        self._progress.advance(self._task)


@contextmanager
def progress_bar(total: int) -> Iterator[Bar]:
    columns = (TextColumn("{task.description:42}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        yield Bar(progress, total)
