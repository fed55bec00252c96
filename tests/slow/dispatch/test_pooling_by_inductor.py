"""Pooling and its gradients compiled by inductor."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from cases_of_pooling import CASES, Pool, run

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.parametrize(("n", "pool", "meaning"), CASES)
def test_inductor(n: int, pool: Pool, meaning: str) -> None:
    found, expected = run(torch.compile(pool), n, meaning), run(pool, n, meaning)
    for mine, wanted in zip(found, expected, strict=True):
        assert torch.equal(mine.get_mask(), wanted.get_mask())
        assert_close(mine.to_tensor(0), wanted.to_tensor(0))
