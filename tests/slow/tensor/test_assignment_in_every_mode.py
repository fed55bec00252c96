"""``x[i] = v`` assigns in graphs and under transforms too (masked_dispatch/assumptions/assignments.py)."""

from __future__ import annotations

import pytest

from masked_dispatch.assumptions.assignments import INDICES, MODES, TARGETS, tried

# Where a transform or a whole graph runs, a tensor that stores no mask cannot get one by a write through a view. In a
# graph that is refused with all that stands beside it, for both masked scalars.
REFUSED = {(mode, "strided, all valid"): calls for mode, calls in (("vmap", 22), ("grad", 22), ("compiled", 44))}


@pytest.mark.parametrize("target", ["plain", "strided", "coo"])
@pytest.mark.parametrize("mode", MODES[1:])
def test_a_number_is_assigned_in_every_mode(mode: str, target: str) -> None:
    found = tried(mode, target, ["a float"])
    assert (found.calls, found.refused, found.wrong) == (len(INDICES), (), ())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("mode", MODES[1:])
def test_every_value_is_assigned_in_every_mode(mode: str, target: str) -> None:
    found = tried(mode, target)
    assert found.wrong == ()
    assert len(found.refused) == REFUSED.get((mode, target), 0)
