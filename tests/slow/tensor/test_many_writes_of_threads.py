"""A hundred thousand writes of each of several threads to masked tensors: none is lost."""

from __future__ import annotations

import pytest

from writing_threads import STARTS, write_and_look


@pytest.mark.parametrize("tenth", range(10))
@pytest.mark.parametrize("start", STARTS)
def test_no_write_of_ten_thousand_is_lost(start: str, tenth: int) -> None:
    write_and_look(start, rounds=1, writes=10_000)
