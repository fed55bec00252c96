"""Words for missing values in compiled code."""

from __future__ import annotations

import pytest
import torch

import masked_dispatch as md
from door_samples import same
from masked_dispatch import missing
from words_for_missing_values import WORDS, X


@pytest.mark.parametrize("word", ["ffill", "interpolate", "shift", "rolling sum", "rolling std", "average"])
def test_compiled(word: str) -> None:
    found = torch.compile(WORDS[word], backend="aot_eager", fullgraph=True)(X)
    torch.compiler.reset()
    same(found, WORDS[word](X))


@pytest.mark.parametrize("word", ["sum", "mean", "std", "min", "median", "last", "rank", "count"])
def test_groups_that_are_counted_from_zero(word: str) -> None:
    labels = torch.tensor([0, 2, 0])

    def statistic(x: md.MaskedTensor) -> torch.Tensor:
        return getattr(missing.groupby(x, labels, dim=1, num_groups=3), word)()

    found = torch.compile(statistic, backend="aot_eager", fullgraph=True)(X)
    torch.compiler.reset()
    torch.testing.assert_close(found, statistic(X)) if word == "count" else same(found, statistic(X))
