"""Any sequence of views of a packed batch gives what it gives of the padded batch (P4)."""

from __future__ import annotations

import pytest

from random_views import check_random_views


@pytest.mark.parametrize("sizes", [(5, 6), (1, 6), (5, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_any_sequence_of_views(seed: int, sizes: tuple[int, int]) -> None:
    check_random_views(seed, sizes)
