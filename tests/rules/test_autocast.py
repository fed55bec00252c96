"""What rules ask about autocast, of devices that have it and of those that have not."""

from __future__ import annotations

import pytest
import torch

import masked_dispatch as md
from op_registry.autocast import autocast_off, autocast_on

CPU, META = torch.device("cpu"), torch.device("meta")


def test_on_where_it_is_on() -> None:
    assert not autocast_on(CPU)
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast_on(CPU)
        with autocast_off(CPU):
            assert not autocast_on(CPU)
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
        assert autocast_on(CPU)


def test_a_device_without_autocast() -> None:
    with pytest.raises(RuntimeError, match="unknown device type for autocast"):
        torch.is_autocast_enabled("meta")
    assert not autocast_on(META)
    with autocast_off(META):
        assert not autocast_on(META)


@pytest.mark.parametrize("on", [False, True])
def test_contractions_count_in_float32(on: bool) -> None:
    """Also where autocast would have them counted in bfloat16."""
    mask = torch.tensor([[True, False], [False, False]])
    with torch.autocast("cpu", torch.bfloat16, enabled=on):
        result = md.masked_tensor(torch.ones(2, 2), mask) @ torch.ones(2, 2)
    assert result.dtype is (torch.bfloat16 if on else torch.float32)
    assert result.get_mask().tolist() == [[True, True], [False, False]]
