"""Words for missing values in compiled code."""

from __future__ import annotations

import pytest
import torch

from door_samples import same
from words_for_missing_values import WORDS, X


@pytest.mark.parametrize("word", ["ffill", "interpolate", "group_mean"])
def test_compiled(word: str) -> None:
    found = torch.compile(WORDS[word], backend="aot_eager", fullgraph=True)(X)
    torch.compiler.reset()
    same(found, WORDS[word](X))
