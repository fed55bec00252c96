"""A hundred thousand writes of each of several threads to one masked tensor: none is lost."""

from __future__ import annotations

import pytest

from writing_threads import STARTS, write_and_look


@pytest.mark.parametrize("start", STARTS)
def test_no_write_of_a_hundred_thousand_is_lost(start: str) -> None:
    write_and_look(start, rounds=1, writes=100_000)
