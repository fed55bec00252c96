"""numpy.ma, pandas and pyarrow as oracles: every function in every library that has it."""

from __future__ import annotations

import pytest
from hypothesis import given

from agreeing_libraries import COLUMNS, LIBRARIES, OF_ONE, OF_TWO, PAIRS, Column, Same, compared


def cases(table: dict[str, Same]) -> list[tuple[str, str]]:
    return [(name, library) for name, row in table.items() for library in LIBRARIES if getattr(row, library)]


@pytest.mark.parametrize("name, library", cases(OF_ONE))
@given(column=COLUMNS)
def test_of_one_column(name: str, library: str, column: Column) -> None:
    compared(name, OF_ONE[name], library, [column])


@pytest.mark.parametrize("name, library", cases(OF_TWO))
@given(columns=PAIRS)
def test_of_two_columns(name: str, library: str, columns: tuple[Column, Column]) -> None:
    compared(name, OF_TWO[name], library, list(columns))
