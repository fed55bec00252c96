"""Measures of what is valid, whatever the padding; scikit-learn's on compressed values are the oracle."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import masked_dispatch as md
from masked_dispatch import metrics

RATIOS = ("f1", "precision", "recall")


def oracle(name: str) -> Callable[..., Any]:
    """A function of scikit-learn, which takes seconds to load, in any process that collects."""
    import sklearn.metrics

    return getattr(sklearn.metrics, name)


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
            theirs = oracle(f"{name}_score")(answers, guessed, average=average, zero_division=chosen)
            if average is None:
                found = found.compressed()
            elif theirs != theirs:  # nothing but 0 / 0, which means leave out
                assert not found.get_mask()
                continue
            assert found.tolist() == pytest.approx(theirs if average is None else float(theirs), nan_ok=True)
    if len(guessed) and int(max(guessed.max(), answers.max())) < 2:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of one class alone
            theirs = oracle(f"{name}_score")(answers, guessed, labels=[0, 1], average="binary", zero_division=0.0)
        assert getattr(metrics, name)(predicted, target).item() == pytest.approx(theirs)


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
    "mae": (metrics.mae, LOGITS[..., 0], TARGET.float(), float("nan")),
    "r2": (metrics.r2, LOGITS[..., 0], TARGET.float(), float("nan")),
    "auroc": (metrics.auroc, LOGITS[..., 0], TARGET % 2, float("nan")),
    "auroc of classes": (metrics.auroc, LOGITS, TARGET, float("nan")),
    "f1 of scores": (lambda p, t: metrics.f1(p, t, "macro"), LOGITS, TARGET, float("nan")),
    "precision": (lambda p, t: metrics.precision(p, t, "weighted"), LOGITS.argmax(-1), TARGET, 2),
    "recall": (lambda p, t: metrics.recall(p, t, "micro"), LOGITS.argmax(-1), TARGET, 2),
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


@pytest.mark.parametrize("name", ["mse", "perplexity", "mae", "r2"])
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
        (lambda: metrics.r2(TARGET, LOGITS), r"\(2, 3\) do not fit a target of shape \(2, 3, 4\)"),
        (lambda: metrics.f1(TARGET, TARGET), "there are 4 classes, .*: choose average='macro'"),
        (lambda: metrics.f1(TARGET, TARGET, "samples"), "average='samples' is not 'binary', 'micro'"),  # type: ignore[arg-type]
        (lambda: metrics.f1(TARGET - 1, TARGET, None), r"run from -1 to 2, .*: labels\.unique\(return_inverse=True\)"),
        (lambda: metrics.recall(TARGET, TARGET, None, num_classes=2), "run from 0 to 3, and num_classes has 0 to 1"),
        (lambda: metrics.auroc(LOGITS[..., 0], TARGET), r"run from 0 to 3, .* has 0 to 1"),
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
    with pytest.raises(ValueError, match=r"\(2, 3, 4\) do not fit a target of \(3,\): they need the same shape"):
        metrics.valid_pairs(LOGITS, TARGET[0])


def test_scores_are_no_classes() -> None:
    with pytest.raises(TypeError, match=r"predicted has dtype torch.float32, .* predicted > 0\.5, or pass scores of C"):
        metrics.f1(LOGITS[..., 0], TARGET)


@given(pairs(), st.sampled_from(RATIOS))
def test_ratios_are_those_of_scikit_learn(pair: tuple[md.MaskedTensor, md.MaskedTensor], name: str) -> None:
    averages_as_in_scikit_learn(*pair, name)


@pytest.mark.filterwarnings("ignore:A single label was found")
@given(pairs(), st.booleans())
def test_a_confusion_matrix_is_that_of_scikit_learn(pair: tuple[md.MaskedTensor, md.MaskedTensor], given: bool) -> None:
    guessed, answers = metrics.valid_pairs(*pair)
    found = metrics.confusion_matrix(*pair, 5 if given else None)
    classes = range(5 if given else len(found))
    if len(guessed):
        assert found.tolist() == oracle("confusion_matrix")(answers, guessed, labels=classes).tolist()
    else:
        assert not found.any()


@given(pairs(classes=2), st.lists(st.sampled_from([0.0, 0.25, 0.5, 2.0]), min_size=12, max_size=12))
def test_auroc_with_ties_is_that_of_scikit_learn(
    pair: tuple[md.MaskedTensor, md.MaskedTensor], drawn: list[float]
) -> None:
    hidden, target = pair
    scores = md.masked_tensor(torch.tensor(drawn[: len(target)]), hidden.get_mask())
    found = metrics.auroc(scores, target)
    kept, answers = metrics.valid_pairs(scores, target)
    assert bool(found.get_mask()) == (len(answers) > 0)
    if len(answers.unique()) == 2:
        assert found.item() == pytest.approx(oracle("roc_auc_score")(answers, kept))
    elif len(answers):
        assert np.isnan(found.item())


def test_auroc_of_each_class_against_the_others() -> None:
    scores, target = torch.softmax(torch.randn(40, 4), -1), torch.randint(0, 4, (40,))
    for average in ("macro", "weighted", None):
        theirs = oracle("roc_auc_score")(target, scores, multi_class="ovr", average=average)
        assert metrics.auroc(scores, target, average).tolist() == pytest.approx(theirs)
    of_each = metrics.auroc(scores, target % 3, None)
    assert of_each.isnan().tolist() == [False, False, False, True]
    assert metrics.auroc(scores, target % 3).item() == pytest.approx(of_each[:3].mean().item())


@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0, 2.5]), st.floats(-5, 5)), min_size=2, max_size=6))
def test_mae_and_r2_are_those_of_scikit_learn(numbers: list[tuple[float, float]]) -> None:
    target, predicted = torch.tensor(numbers, dtype=torch.float64).unbind(1)
    assert metrics.mae(predicted, target).item() == pytest.approx(oracle("mean_absolute_error")(target, predicted))
    assert metrics.r2(predicted, target).item() == pytest.approx(oracle("r2_score")(target, predicted))
    assert np.isnan(metrics.r2(predicted[:1], target[:1]).item())


def test_classes_that_do_not_occur_are_invalid_and_0_over_0_is_chosen() -> None:
    guessed, answers = torch.tensor([0, 2, 2]), torch.tensor([0, 1, 1])
    found = metrics.precision(guessed, answers, None, num_classes=5)
    assert found.get_mask().tolist() == [True, True, True, False, False]
    assert found.compressed().tolist() == [1, 0, 0]
    assert metrics.precision(guessed, answers, None, zero_division=0.5).tolist() == [1, 0.5, 0]
    assert metrics.precision(guessed, answers, "macro", zero_division=float("nan")).item() == 0.5


def test_names_of_other_libraries() -> None:
    for name in metrics.WORDS:
        with pytest.raises(AttributeError, match=f"no attribute '{name}'; here it is written "):
            getattr(metrics, name)


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

    @pytest.mark.parametrize("target", [TARGET % 2, under(TARGET % 2, 1)], ids=["plain", "masked"])
    def test_an_error_inside_of_it_names_the_pairs(self, torchmetrics: Any, target: Tensor) -> None:
        given = (under(torch.rand(2, 3), 1), target)
        measure = torchmetrics.AUROC(task="binary")
        with pytest.raises(
            md.InvalidValueError, match=r"torchmetrics asked, .* \*masked_dispatch\.metrics\.valid_pairs\("
        ):
            measure(*given)
        assert measure(*metrics.valid_pairs(*given)).item() == pytest.approx(metrics.auroc(*given).item(), nan_ok=True)

    def test_a_measure_weighted_by_its_count(self, torchmetrics: Any) -> None:
        target = under(TARGET, 0)
        mean = torchmetrics.MeanMetric()
        for row in range(2):
            mean.update(metrics.accuracy(LOGITS[row], target[row]).to_tensor(0), target[row].count())
        assert mean.compute().item() == pytest.approx(metrics.accuracy(LOGITS, target).item())
