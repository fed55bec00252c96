"""What masks cost on many ranks, counted on one of them: the same on all numbers of ranks, and as the docs say."""

from __future__ import annotations

import pytest
import torch

from examples.distributed import scaling
from repository import ROOT

FEW, MORE = 8, 64


@pytest.mark.parametrize("style", scaling.STYLES)
def test_nothing_grows_with_ranks_that_does_not_for_plain_tensors(style: str) -> None:
    costs = {n: (scaling.cost(style, n, False), scaling.cost(style, n, True)) for n in (FEW, MORE)}
    few, more = (masked - plain for plain, masked in costs.values())
    assert few.calls == more.calls > 0
    assert few.bytes == more.bytes > 0
    assert more.peak <= few.peak
    page = (ROOT / "docs/distributed.md").read_text(encoding="utf-8").splitlines()
    for row in scaling.table({(style, n): both for n, both in costs.items()})[2:]:
        # The memory that torch itself takes may differ between its versions; and some move each mask of tensor parallel
        # modules twice.
        *counted, _memory, _end = row.replace("+ 2048 B", "+ 1024 B").split("|")
        assert [line for line in page if line.startswith("|".join(counted))], row


def test_the_ledger_counts_what_is_there_at_a_time() -> None:
    model = torch.nn.Linear(1, 1)
    with scaling.Ledger(model) as ledger:
        for _ in range(3):
            x = torch.zeros(1000)
            x = x + 1
            del x
    assert ledger.cost() == scaling.Cost(0, 0, 2 * 4000 + 2 * 4)
