"""Measures of predictions over the elements that are valid in both the prediction and the target.

Each takes the predictions first, as torch's losses do (scikit-learn takes the target first), and gives a masked scalar,
invalid if nothing is valid. `mse`, `mae`, `r2` and `perplexity` are differentiable. `valid_pairs` gives the elements
themselves, for measures of other libraries.

Classes are integers from 0 on. Precision, recall and F1 are ratios of counts, and take

num_classes    the number of classes; by default the number of scores, or one more than the greatest class
average        "binary": the ratio of class 1; "micro": of the counts of all classes; "macro": the mean over classes;
               "weighted": the mean weighted by how often a class is the target; None: a masked vector, with a ratio for
               each class. Means leave out classes that occur neither as prediction nor as target; their ratio is
               invalid
zero_division  the value of 0 / 0, such as the precision of a class that is never predicted; means leave NaN out
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NoReturn

import torch
from torch import Tensor

from masked_dispatch.api.along_dim import average_ranks
from masked_dispatch.api.construct import as_masked_tensor, mask_like
from masked_dispatch.api.sums import average as weighted_mean
from masked_dispatch.interop.crossing import extent_of, filled, mask_of, placed_like, takes
from masked_dispatch.tensor.checks import least_and_most, values_unknown
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.messages import no_such_name
from op_registry import MaskedSemanticsError
from op_registry.records.arguments import accumulation_dtype

__all__ = [
    "accuracy",
    "auroc",
    "confusion_matrix",
    "f1",
    "mae",
    "mse",
    "perplexity",
    "precision",
    "r2",
    "recall",
    "valid_pairs",
]

# What scikit-learn and torchmetrics call them, and what to write here.
_OF_RANKINGS = "in a few lines of topk and gather, which docs/recipes/ratings.md has"
WORDS = {
    "accuracy_score": "accuracy(predicted, target)",
    "confusion": "confusion_matrix(predicted, target)",
    "f1_score": "f1(predicted, target)",
    **dict.fromkeys(("hit_rate", "hit_rate_at_k", "mrr", "ndcg", "ndcg_at_k", "recall_at_k"), _OF_RANKINGS),
    "mean_absolute_error": "mae(predicted, target)",
    "mean_squared_error": "mse(predicted, target)",
    "precision_score": "precision(predicted, target)",
    "r2_score": "r2(predicted, target)",
    "recall_score": "recall(predicted, target)",
    "roc_auc_score": "auroc(scores, target)",
    "root_mean_squared_error": "mse(predicted, target).sqrt()",
}

takes_tensors = takes(predicted=Tensor, target=Tensor)

Average = Literal["binary", "micro", "macro", "weighted"] | None


def __dir__() -> list[str]:
    return [*__all__]


if not TYPE_CHECKING:  # a type checker would take any name for an attribute

    def __getattr__(name: str) -> NoReturn:
        no_such_name(__name__, name, WORDS, __all__)


@takes_tensors
def accuracy(predicted: Tensor, target: Tensor) -> Tensor:
    """The share of correct classes, a float32 scalar.

    predicted  classes, of the target's shape; or scores of the C classes, shape (…, C), of which the greatest counts
    target     classes, shape (…)
    """
    predicted = _as_classes(predicted, target)
    return (as_masked_tensor(predicted) == target).to(torch.float32).mean()


@takes_tensors
def precision(
    predicted: Tensor,
    target: Tensor,
    average: Average = "binary",
    *,
    num_classes: int | None = None,
    zero_division: float = 0.0,
) -> Tensor:
    """The share of the elements predicted as a class that belong to it, float32; as scikit-learn's precision_score.

    predicted  classes, of the target's shape; or scores of the C classes, shape (…, C), of which the greatest counts
    target     classes, shape (…)

    The other arguments are described above. Raises TypeError for scores in place of classes, ValueError for shapes
    and classes that do not fit, and for more than two classes with ``average="binary"``.
    """
    correct, guessed, actual = _counts(predicted, target, average, num_classes)
    return _averaged(correct, guessed, guessed + actual, actual, average, zero_division)


@takes_tensors
def recall(
    predicted: Tensor,
    target: Tensor,
    average: Average = "binary",
    *,
    num_classes: int | None = None,
    zero_division: float = 0.0,
) -> Tensor:
    """The share of the elements of a class that are predicted as it, float32; as scikit-learn's recall_score.

    Arguments and errors are those of `precision`.
    """
    correct, guessed, actual = _counts(predicted, target, average, num_classes)
    return _averaged(correct, actual, guessed + actual, actual, average, zero_division)


@takes_tensors
def f1(
    predicted: Tensor,
    target: Tensor,
    average: Average = "binary",
    *,
    num_classes: int | None = None,
    zero_division: float = 0.0,
) -> Tensor:
    """The harmonic mean of precision and recall, float32; as scikit-learn's f1_score.

    Arguments and errors are those of `precision`.
    """
    correct, guessed, actual = _counts(predicted, target, average, num_classes)
    return _averaged(2 * correct, guessed + actual, guessed + actual, actual, average, zero_division)


@takes_tensors
def confusion_matrix(predicted: Tensor, target: Tensor, num_classes: int | None = None) -> Tensor:
    """How often a target (row) is predicted as a class (column): a plain int64 tensor of shape (C, C).

    Arguments and errors are those of `precision`. scikit-learn leaves out classes that do not occur.
    """
    classes, answers, num_classes = _pairs_of_classes(predicted, target, num_classes)
    return torch.bincount(answers * num_classes + classes, minlength=num_classes**2).view(num_classes, num_classes)


@takes(scores=Tensor, target=Tensor)
def auroc(scores: Tensor, target: Tensor, average: Literal["macro", "weighted"] | None = "macro") -> Tensor:
    """The area under the ROC curve, float32; as scikit-learn's roc_auc_score.

    The area is the probability that an element of the class has a greater score than one of another class; equal scores
    count half.

    scores   of class 1, shape of the target; or of each of the C classes against the others, shape (…, C): an element
             counts if all its scores are valid
    target   classes, shape (…)
    average  of the areas of C classes: "macro": their mean; "weighted": their mean weighted by how often a class is the
             target; None: a masked vector

    If all targets belong to a class, or none does, its area is NaN, and means leave it out (scikit-learn gives NaN too,
    and warns). NaN scores give NaN. The area has no gradient.

    Raises ValueError for shapes and classes that do not fit.
    """
    binary = scores.shape == target.shape
    scores, answers = valid_pairs(scores, target)
    num_classes = 2 if binary else scores.shape[-1]
    _check_classes(answers, num_classes, "scores of shape (..., C)" if binary else "these scores")
    if binary:
        scores = scores[:, None]
    of_class = answers[:, None] == torch.arange(1 if binary else 0, num_classes, device=scores.device)
    ranks = average_ranks(scores, torch.zeros_like(scores, dtype=torch.int64), 0)
    actual, others = of_class.sum(0), (~of_class).sum(0)
    above = (ranks * of_class).sum(0) - actual * (actual + 1) / 2  # Mann and Whitney's U
    areas = torch.where(scores.isnan().any(0), torch.nan, above / (actual * others)).to(torch.float32)
    some = torch.tensor(len(answers) > 0, device=scores.device)
    if binary:
        return as_masked_tensor(areas[0], some)
    if average is None:
        return as_masked_tensor(areas, some)
    defined = as_masked_tensor(areas, actual * others > 0)
    return as_masked_tensor(_mean_over_classes(defined, actual, average).to_tensor(torch.nan), some)


@takes_tensors
def mse(predicted: Tensor, target: Tensor) -> Tensor:
    """The mean squared difference of two tensors of the same shape (nothing is broadcast), a scalar."""
    return _differences(predicted, target).square().mean()


@takes_tensors
def mae(predicted: Tensor, target: Tensor) -> Tensor:
    """The mean absolute difference of two tensors of the same shape (nothing is broadcast), a scalar."""
    return _differences(predicted, target).abs().mean()


@takes_tensors
def r2(predicted: Tensor, target: Tensor) -> Tensor:
    """The share of the target's variance that the predictions explain, a scalar; as scikit-learn's r2_score.

    Both have the same shape, and all elements make one sample (scikit-learn averages over columns). One pair gives NaN;
    a constant target gives 1 if every prediction is right, and 0 otherwise.
    """
    differences = _differences(predicted, target)
    dtype = differences.dtype
    differences = differences.to(accumulation_dtype(dtype))  # type: ignore[assignment]
    targets = mask_like(as_masked_tensor(target).to(differences.dtype), differences)
    left = filled(differences.square().sum())
    spread = filled((targets - targets.mean()).square().sum())
    count = mask_of(differences).sum()
    constant = spread == 0
    score = torch.where(constant, (left == 0).to(left.dtype), 1 - left / torch.where(constant, 1, spread))
    return as_masked_tensor(torch.where(count < 2, torch.nan, score).to(dtype), count > 0)


@takes(logits=Tensor, target=Tensor)
def perplexity(logits: Tensor, target: Tensor) -> Tensor:
    """exp of the mean cross-entropy of the target's classes, a scalar.

    logits  shape (…, C)
    target  int64, shape (…)
    """
    if logits.shape[:-1] != target.shape:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} do not fit a target of shape {tuple(target.shape)}: they have "
            "shape (..., C) for a target of shape (...)"
        )
    losses = torch.nn.functional.cross_entropy(
        as_masked_tensor(logits).flatten(0, -2), target.flatten(), reduction="none"
    )
    return losses.mean().exp()


@takes_tensors
def valid_pairs(predicted: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Predictions and targets where both are valid, as plain tensors, for libraries that do not support masks.

    predicted  shape of the target, or (…, C): C scores, which make a pair if all of them are valid
    target     shape (…)

    Returns tensors of shapes (N,), or (N, C), and (N,). torchmetrics and scikit-learn divide by the *size* of their
    arguments: pass them pairs rather than masked tensors.

    Raises ValueError for shapes that do not fit; MaskedSemanticsError for padded batches whose samples lie at
    different places, or have different numbers of classes.
    """
    if target.shape not in (predicted.shape, predicted.shape[:-1]):
        raise ValueError(
            f"predictions of shape {tuple(predicted.shape)} do not fit a target of {tuple(target.shape)}: they need "
            "the same shape, or one more dimension at the end"
        )
    scores = predicted.ndim != target.ndim
    there = placed_like(torch.ones(predicted.shape, dtype=torch.bool, device=predicted.device), predicted)
    if scores and bool((extent_of(predicted).all(-1) != extent_of(predicted).any(-1)).any()):
        raise MaskedSemanticsError(
            f"scores of shape {tuple(predicted.shape)} have other numbers of classes in other samples, which a tensor "
            "of pairs (N, C) cannot: compare the best ones, predicted.argmax(-1), or pass predicted.without_extent()"
        )
    placed_like(there.all(-1) if scores else there, target)  # their samples meet, or the call is refused
    mask = mask_of(predicted)
    mask = mask_of(target) & (mask.all(-1) if scores else mask)
    return filled(predicted)[mask], filled(target)[mask]


# ------------------------------------------------------------------------------------------------------------- helpers


def _as_classes(predicted: Tensor, target: Tensor) -> Tensor:
    """Predicted classes in the shape of the target, from scores too."""
    if predicted.ndim == target.ndim + 1:
        predicted = predicted.argmax(-1)
    if predicted.shape != target.shape:
        raise ValueError(
            f"predictions of shape {tuple(predicted.shape)} do not fit a target of shape {tuple(target.shape)}: "
            "classes need the same shape, scores one more dimension at the end"
        )
    return predicted


def _differences(predicted: Tensor, target: Tensor) -> MaskedTensor:
    if predicted.shape != target.shape:
        raise ValueError(
            f"predictions of shape {tuple(predicted.shape)} do not fit a target of shape {tuple(target.shape)}"
        )
    return as_masked_tensor(predicted) - target  # type: ignore[return-value]


def _pairs_of_classes(predicted: Tensor, target: Tensor, num_classes: int | None) -> tuple[Tensor, Tensor, int]:
    """Predicted and target classes where both are valid, int64, and the number of classes."""
    if num_classes is None and predicted.ndim == target.ndim + 1:
        num_classes = predicted.shape[-1]
    classes = _as_classes(predicted, target)
    for name, given in (("predicted", classes), ("target", target)):
        if given.is_floating_point() or given.is_complex():
            raise TypeError(
                f"{name} has dtype {given.dtype}, but classes have to be integers or bool: compare scores of two "
                "classes, predicted > 0.5, or pass scores of C classes, shape (..., C)"
            )
    classes, answers = (part.to(torch.int64) for part in valid_pairs(classes, target))
    if num_classes is None:
        num_classes = 1 + max((int(part.max()) for part in (classes, answers) if part.numel()), default=-1)
    _check_classes(classes, num_classes, "num_classes")
    _check_classes(answers, num_classes, "num_classes")
    return classes, answers, num_classes


def _check_classes(classes: Tensor, num_classes: int, by: str) -> None:
    if classes.numel() and not values_unknown(classes):
        least, most = least_and_most(classes)
        if least < 0 or most >= num_classes:
            raise ValueError(
                f"classes run from {least} to {most}, and {by} has 0 to {num_classes - 1}. Number other labels from 0 "
                "on: labels.unique(return_inverse=True)"
            )


def _counts(
    predicted: Tensor, target: Tensor, average: Average, num_classes: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """How often each class is predicted rightly, is predicted, and is the target."""
    if average not in ("binary", "micro", "macro", "weighted", None):
        raise ValueError(f"average={average!r} is not 'binary', 'micro', 'macro', 'weighted' or None")
    classes, answers, count = _pairs_of_classes(predicted, target, num_classes)
    if average == "binary":
        if count > 2:
            raise ValueError(
                f"there are {count} classes, but average='binary' needs two: choose average='macro', 'micro', "
                "'weighted' or None"
            )
        count = 2
    parts = (classes[classes == answers], classes, answers)
    return tuple(torch.bincount(part, minlength=count) for part in parts)  # type: ignore[return-value]


def _averaged(
    parts: Tensor, wholes: Tensor, occurrences: Tensor, actual: Tensor, average: Average, zero_division: float
) -> Tensor:
    """The ratios of counts, one for each class, averaged."""
    some = occurrences.sum() > 0
    if average == "binary":
        parts, wholes = parts[1], wholes[1]
    if average == "micro":
        parts, wholes = parts.sum(), wholes.sum()
    ratios = torch.where(wholes > 0, parts / wholes.clamp(min=1), zero_division).to(torch.float32)
    if average in ("binary", "micro"):
        return as_masked_tensor(ratios, some)
    if average is None:
        return as_masked_tensor(ratios, occurrences > 0)
    defined = as_masked_tensor(ratios, (occurrences > 0) & ~ratios.isnan())
    return _mean_over_classes(defined, actual, average).mask_with(some)


def _mean_over_classes(defined: MaskedTensor, actual: Tensor, average: Average) -> MaskedTensor:
    """The mean over classes with a defined measure: equal weights for "macro", counts of targets for "weighted".

    The weights are equal too, as in scikit-learn, if no class with a defined measure is a target.
    """
    weights = torch.where(defined.get_mask(), actual, 0).to(torch.float32)
    if average == "macro":
        weights = torch.ones_like(weights)
    return weighted_mean(defined, torch.where(weights.sum() > 0, weights, 1))  # type: ignore[return-value]
