"""Every broadcasting operator with a hybrid COO operand beside others of fewer, more and different dimensions."""

from __future__ import annotations

import pytest

from broadcasting_operators import broadcasting, faults


@pytest.mark.parametrize("name", broadcasting())
def test_a_hybrid_operand_broadcasts_as_any_other(name):
    found = list(faults(broadcasting()[name]))
    assert len(found) >= 162
    assert not any(found), "\n".join(filter(None, found))
