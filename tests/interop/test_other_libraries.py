"""numpy.ma, pandas and pyarrow as oracles: where their semantics coincide with ours.

A column is a list of numbers, some missing. Every library gets it in its own form, with garbage where something is
missing: a masked array, a Series of nullable Float64, an arrow array with nulls. The list is in
docs/other_libraries.md; where they differ, test_other_library_differences.py.

Here each function is compared with one of them, by turns, on a few columns; in
tests/thorough/interop/test_every_other_library.py with all, on more.
"""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given, settings

from agreeing_libraries import COLUMNS, LIBRARIES, OF_ONE, OF_TWO, PAIRS, Same, compared
from other_libraries import Column
from repository import ROOT


def by_turns(table: dict[str, Same]) -> list[tuple[str, str]]:
    """Each function with one of the libraries that have it."""
    having = [(name, [library for library in LIBRARIES if getattr(row, library)]) for name, row in table.items()]
    return [(name, libraries[turn % len(libraries)]) for turn, (name, libraries) in zip(count(), having, strict=False)]


@pytest.mark.parametrize("name, library", by_turns(OF_ONE))
@settings(max_examples=12)
@given(column=COLUMNS)
def test_of_one_column(name: str, library: str, column: Column) -> None:
    compared(name, OF_ONE[name], library, [column])


@pytest.mark.parametrize("name, library", by_turns(OF_TWO))
@settings(max_examples=12)
@given(columns=PAIRS)
def test_of_two_columns(name: str, library: str, columns: tuple[Column, Column]) -> None:
    compared(name, OF_TWO[name], library, list(columns))


def test_the_document_has_every_function() -> None:
    text = (ROOT / "docs" / "other_libraries.md").read_text(encoding="utf-8")
    names = {name.partition(",")[0].partition("(")[0].strip() for name in (*OF_ONE, *OF_TWO)}
    missing = [name for name in sorted(names) if f"`{name}`" not in text]
    assert not missing, missing
