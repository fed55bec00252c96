"""What needs no group: refusals, and errors of one rank; the rest runs in processes (test_collectives.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import masked_dispatch as md
from masked_dispatch.dispatch.run_rule import run_again
from op_registry.records.dense import Dense


def test_a_group_is_needed() -> None:
    with pytest.raises(ValueError, match=r"distributed\.mean needs a process group: call"):
        md.distributed.mean(torch.ones(3))


def test_an_error_that_one_rank_has_alone_asks_the_others_for_nothing() -> None:
    part: Any = torch.ones(2)
    part.placements = ()  # as a distributed tensor has
    runs: list[Any] = []
    with pytest.raises(RuntimeError, match="zero size"):
        run_again(RuntimeError("max(): reduction over a dimension of zero size"), runs.append, [Dense(part)], {})
    assert runs == []
