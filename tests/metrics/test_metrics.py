"""accuracy, mse and perplexity: those of what is valid, whatever the padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from masked_dispatch import metrics

torch.manual_seed(0)
LOGITS = torch.randn(2, 3, 4)
TARGET = torch.tensor([[0, 1, 3], [2, 2, 1]])
MASK = torch.tensor([[True, True, False], [True, False, False]])


def under(tensor: Tensor, hidden: float) -> md.MaskedTensor:
    mask = MASK.view(2, 3, *[1] * (tensor.ndim - 2))
    return md.masked_tensor(tensor.masked_fill(~mask, hidden), mask)


CASES: dict[str, tuple[Callable[[Any, Any], Tensor], Tensor, Tensor, float]] = {
    "accuracy of scores": (metrics.accuracy, LOGITS, TARGET, float("nan")),
    "accuracy of classes": (metrics.accuracy, LOGITS.argmax(-1), TARGET, 2),
    "mse": (metrics.mse, LOGITS[..., 0], TARGET.float(), float("nan")),
    "perplexity": (metrics.perplexity, LOGITS, TARGET, float("inf")),
}


@pytest.mark.parametrize("name", CASES)
def test_only_what_is_valid_counts(name: str) -> None:
    metric, predicted, target, hidden = CASES[name]
    expected = metric(predicted[MASK], target[MASK])
    assert expected.ndim == 0
    for found in (
        metric(under(predicted, hidden), target),
        metric(predicted, under(target, 1)),
        metric(under(predicted, 0), under(target, 2)),
    ):
        torch.testing.assert_close(found.to_tensor(-1), expected.to_tensor(-2))


@pytest.mark.parametrize("name", CASES)
def test_of_nothing_valid(name: str) -> None:
    metric, predicted, target, hidden = CASES[name]
    nothing = under(predicted, hidden).mask_with(torch.tensor(False))
    assert not metric(nothing, target).get_mask()


def test_values() -> None:
    assert metrics.accuracy(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 0, 3, 4])).item() == 0.75
    assert metrics.mse(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 5.0])).item() == 5
    assert metrics.perplexity(torch.zeros(3, 8), torch.tensor([1, 2, 7])).item() == pytest.approx(8)


@pytest.mark.parametrize("name", ["mse", "perplexity"])
def test_gradients(name: str) -> None:
    metric, predicted, target, _ = CASES[name]
    leaf = predicted.clone().requires_grad_()
    mask = MASK.view(2, 3, *[1] * (leaf.ndim - 2))
    metric(md.as_masked_tensor(leaf, mask), target).backward()
    assert leaf.grad[~MASK].eq(0).all()
    assert leaf.grad[MASK].ne(0).any()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: metrics.accuracy(LOGITS, TARGET[:1]),
            r"shape \(2, 3\) do not fit .* of shape \(1, 3\): classes",
        ),
        (lambda: metrics.mse(LOGITS, LOGITS[:1]), r"\(2, 3, 4\) do not fit a target of shape \(1, 3, 4\)"),
        (lambda: metrics.perplexity(LOGITS, TARGET[:1]), r"logits of shape \(2, 3, 4\) do not fit"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()


@pytest.mark.parametrize("predicted", [LOGITS, LOGITS[..., 0]], ids=["scores", "values"])
def test_valid_pairs(predicted: Tensor) -> None:
    masked, plain = metrics.valid_pairs(under(predicted, float("nan")), TARGET), (predicted[MASK], TARGET[MASK])
    for found in (masked, metrics.valid_pairs(predicted, under(TARGET, 7))):
        assert [type(part) for part in found] == [Tensor, Tensor]
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def test_scores_that_are_valid_in_part_are_no_pair() -> None:
    scores = md.masked_tensor(LOGITS, torch.arange(4) < 3)
    assert metrics.valid_pairs(scores, TARGET)[0].shape == (0, 4)
    with pytest.raises(ValueError, match=r"\(2, 3, 4\) do not fit a target of \(3,\): they have the same shape"):
        metrics.valid_pairs(LOGITS, TARGET[0])


class TestTorchmetrics:
    """What torchmetrics is given: pairs, or a measure and the number of elements that it is of."""

    @pytest.fixture
    def torchmetrics(self) -> Any:
        return pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")

    def test_pairs(self, torchmetrics: Any) -> None:
        target = under(TARGET, 0)
        accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=4, average="micro")
        error = torchmetrics.MeanSquaredError()
        for row in range(2):
            accuracy.update(*metrics.valid_pairs(LOGITS[row], target[row]))
            error.update(*metrics.valid_pairs(LOGITS[row, :, 0], target[row]))
        assert accuracy.compute().item() == pytest.approx(metrics.accuracy(LOGITS, target).item())
        assert error.compute().item() == pytest.approx(metrics.mse(LOGITS[..., 0], target).item())

    def test_a_measure_weighted_by_its_count(self, torchmetrics: Any) -> None:
        target = under(TARGET, 0)
        mean = torchmetrics.MeanMetric()
        for row in range(2):
            mean.update(metrics.accuracy(LOGITS[row], target[row]).to_tensor(0), target[row].count())
        assert mean.compute().item() == pytest.approx(metrics.accuracy(LOGITS, target).item())
