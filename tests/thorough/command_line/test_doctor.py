"""``python -m masked_dispatch doctor`` on the torch that is installed: nothing is broken."""

from __future__ import annotations

from masked_dispatch.command_line import doctor


def test_doctor_finds_nothing_broken_here() -> None:
    parts = list(doctor.parts())
    assert [part.broken for part in parts] == [()] * len(parts)
    assert [part.title for part in parts[:3]] == ["assumptions about torch", "x[i] = v", "laws on cpu"]
    assert all(part.asked > 19 for part in parts)
