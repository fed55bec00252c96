"""Two families; the others are in tests/thorough/interop/test_families_of_transformers.py."""

from __future__ import annotations

import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from families_of_transformers import FAMILIES, alone, masked  # noqa: E402 - it needs transformers


@pytest.mark.parametrize("name, side", [("BERT", "right"), ("OPT", "left")])
def test_a_batch_gives_what_its_samples_give(name: str, side: str) -> None:
    model = FAMILIES[name].build()
    assert masked(model, side).difference(alone(model)) < 1e-6
