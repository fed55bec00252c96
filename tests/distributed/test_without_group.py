"""What statistics over ranks say where there is no group; the rest runs in processes (test_collectives.py)."""

from __future__ import annotations

import pytest
import torch

import masked_dispatch as md


def test_a_group_is_needed() -> None:
    with pytest.raises(ValueError, match=r"distributed\.mean needs a process group: call"):
        md.distributed.mean(torch.ones(3))
