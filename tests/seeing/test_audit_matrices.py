"""An audit names matrices that holes make invalid, and products with their own transpose whose sums do not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import masked_dispatch as md
from audited_calls import advice_of, findings_in

GENERATOR = torch.Generator().manual_seed(0)
# Features around 5, and a target.
MASK = torch.rand(40, 3, generator=GENERATOR) > 0.2
A = md.masked_tensor(5 + torch.randn(40, 3, generator=GENERATOR), MASK)
TARGET = torch.randn(40, 1, generator=GENERATOR)
WITH_ONES = torch.cat([A, torch.ones(40, 1)], 1)
ROWS = MASK.all(1)
CENTRED = A - A.mean(0)
PADDED = md.from_lengths(torch.randn(3, 5, 4, generator=GENERATOR), torch.tensor([5, 2, 3]))
ROWS_MISSING = A.to_tensor(0) + md.masked_tensor(torch.zeros(40, 1), ROWS[:, None])


@pytest.mark.parametrize(
    "f",
    [
        lambda: torch.linalg.solve(A.mT @ A, A.mT @ TARGET),
        lambda: torch.matmul(A.T, A),
        lambda: A.mT.mm(A),
        lambda: WITH_ONES.mT @ WITH_ONES,
        lambda: A.unsqueeze(0).mT @ A.unsqueeze(0),
    ],
)
def test_a_product_with_its_own_transpose(f: Callable[[], Any]) -> None:
    assert findings_in(f) == [("own transpose", int((~MASK).sum()))]


def test_what_it_says() -> None:
    assert advice_of(lambda: A.mT @ A) == [
        "    a tensor with holes was multiplied by its own transpose: its sums leave out different rows, and do not "
        f"fit one another: {int((~MASK).sum())} elements",
        "    -> centre first, x - x.mean(0); or take the rows without holes, x[x.get_mask().all(1)]; or torch.cov(x.T)",
    ]
    assert advice_of(lambda: torch.linalg.lstsq(A, TARGET)) == [
        "    a matrix with holes has no result: an invalid element makes all of it invalid: 3 rows",
        "    -> take the rows without holes, x[x.get_mask().all(1)]; or centre the columns and fill them, "
        "(x - x.mean(0)).to_tensor(0)",
    ]


@pytest.mark.parametrize(
    "f",
    [
        lambda: CENTRED.mT @ CENTRED,
        lambda: torch.cov(A.T),
        lambda: torch.corrcoef(A.T),
        lambda: torch.linalg.lstsq(A[ROWS], TARGET[ROWS]),
        lambda: A[ROWS].mT @ A[ROWS],
        lambda: torch.linalg.lstsq(CENTRED.to_tensor(0), TARGET),
        lambda: ROWS_MISSING @ ROWS_MISSING.mT,
        lambda: ROWS_MISSING.mT @ ROWS_MISSING,
        lambda: PADDED @ PADDED.mT,
        lambda: PADDED.mT @ PADDED,
        lambda: A.mT @ CENTRED,
        lambda: torch.linalg.cholesky(md.masked_tensor(torch.eye(3), torch.zeros(3, 3).bool())),
    ],
)
def test_what_is_right_is_silent(f: Callable[[], Any]) -> None:
    assert findings_in(f) == []


@pytest.mark.parametrize("f", [torch.linalg.pinv, torch.linalg.qr, lambda a: torch.linalg.inv(a[:3])])
def test_a_matrix_that_a_hole_makes_invalid(f: Callable[[Any], Any]) -> None:
    one_hole = md.masked_tensor(torch.eye(40)[:, :3] + 1, torch.arange(120).view(40, 3) != 4)
    assert [kind for kind, _ in findings_in(lambda: f(one_hole))] == ["lost matrix"]
