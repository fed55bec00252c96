"""Measures of predictions over the elements that are valid in both the prediction and the target.

Each gives a masked scalar, invalid if nothing is valid. All but `accuracy` are differentiable. `valid_pairs` gives the
elements themselves, for measures of other libraries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from masked_dispatch.api.construct import as_masked_tensor
from masked_dispatch.interop.crossing import filled, mask_of

__all__ = ["accuracy", "mse", "perplexity", "valid_pairs"]


def __dir__() -> list[str]:
    return [*__all__]


def accuracy(predicted: Tensor, target: Tensor) -> Tensor:
    """The share of correct classes, a float32 scalar.

    predicted  classes, of the target's shape; or scores of the C classes, shape (…, C), of which the greatest counts
    target     classes, shape (…)
    """
    if predicted.ndim == target.ndim + 1:
        predicted = predicted.argmax(-1)
    if predicted.shape != target.shape:
        raise ValueError(
            f"predictions of shape {tuple(predicted.shape)} do not fit a target of shape {tuple(target.shape)}: "
            "classes have the same shape, scores one more dimension, the last"
        )
    return (as_masked_tensor(predicted) == target).to(torch.float32).mean()


def mse(predicted: Tensor, target: Tensor) -> Tensor:
    """The mean squared difference, a scalar. Of one shape: nothing is broadcast."""
    if predicted.shape != target.shape:
        raise ValueError(
            f"predictions of shape {tuple(predicted.shape)} do not fit a target of shape {tuple(target.shape)}"
        )
    return (as_masked_tensor(predicted) - target).square().mean()


def perplexity(logits: Tensor, target: Tensor) -> Tensor:
    """exp of the mean cross-entropy of the target's classes, a scalar.

    logits  shape (…, C)
    target  int64, shape (…)
    """
    if logits.shape[:-1] != target.shape:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} do not fit a target of shape {tuple(target.shape)}: they are "
            "(…, C) for a target of (…)"
        )
    losses = torch.nn.functional.cross_entropy(
        as_masked_tensor(logits).flatten(0, -2), target.flatten(), reduction="none"
    )
    return losses.mean().exp()


def valid_pairs(predicted: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Predictions and targets where both are valid, as plain tensors, for libraries that know no masks.

    predicted  shape of the target, or (…, C): C scores, a pair if all of them are valid
    target     shape (…)

    Gives shapes (N,), or (N, C), and (N,). torchmetrics and scikit-learn divide by the *size* of what they are given:
    pass them pairs rather than masked tensors.

    Raises ValueError for shapes that do not fit.
    """
    if target.shape not in (predicted.shape, predicted.shape[:-1]):
        raise ValueError(
            f"predictions of shape {tuple(predicted.shape)} do not fit a target of {tuple(target.shape)}: "
            "they have the same shape, or one more dimension, the last"
        )
    mask = mask_of(predicted)
    mask = mask_of(target) & (mask if predicted.ndim == target.ndim else mask.all(-1))
    return filled(predicted)[mask], filled(target)[mask]
