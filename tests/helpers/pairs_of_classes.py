"""Predicted and target classes with holes, and measures of them beside scikit-learn's."""

from __future__ import annotations

import warnings

import pytest
import sklearn.metrics
import torch
from hypothesis import strategies as st

import masked_dispatch as md
from masked_dispatch import metrics

RATIOS = {
    "f1": sklearn.metrics.f1_score,
    "precision": sklearn.metrics.precision_score,
    "recall": sklearn.metrics.recall_score,
}


@st.composite
def pairs(draw: st.DrawFn, classes: int = 4) -> tuple[md.MaskedTensor, md.MaskedTensor]:
    count = draw(st.integers(0, 12))
    parts = []
    for _ in range(2):
        numbers = draw(st.lists(st.integers(0, classes - 1), min_size=count, max_size=count))
        mask = draw(st.lists(st.booleans(), min_size=count, max_size=count))
        parts.append(md.masked_tensor(torch.tensor(numbers, dtype=torch.int64), torch.tensor(mask, dtype=torch.bool)))
    return parts[0], parts[1]


def averages_as_in_scikit_learn(predicted: md.MaskedTensor, target: md.MaskedTensor, name: str) -> None:
    """Every average of the ratio is scikit-learn's on what is valid, and of nothing invalid."""
    guessed, answers = metrics.valid_pairs(predicted, target)
    for average in ("macro", "micro", "weighted", None):
        for chosen in (0.0, 1.0, float("nan")):
            found = getattr(metrics, name)(predicted, target, average, zero_division=chosen)
            if not len(guessed):
                assert not found.get_mask().any()
                continue
            theirs = RATIOS[name](answers, guessed, average=average, zero_division=chosen)
            if average is None:
                found = found.compressed()
            elif theirs != theirs:  # nothing but 0 / 0, which means leave out
                assert not found.get_mask()
                continue
            assert found.tolist() == pytest.approx(theirs if average is None else float(theirs), nan_ok=True)
    if len(guessed) and int(max(guessed.max(), answers.max())) < 2:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of one class alone
            theirs = RATIOS[name](answers, guessed, labels=[0, 1], average="binary", zero_division=0.0)
        assert getattr(metrics, name)(predicted, target).item() == pytest.approx(theirs)
