"""The law "later", of P5: where another operand's mask leaves all results out, operands get nothing back.

Each masked operand comes from a square root of zeros, whose derivative is infinite at every element. If anything is
multiplied with it, even a 0, the gradient is NaN.
"""

from __future__ import annotations

from typing import Any

import torch

from op_registry.conformance import plain_torch
from op_registry.conformance.gradients import only_its_rule_may_have_one
from op_registry.conformance.laws import gradients_of
from op_registry.conformance.masks import ITSELF, SHARED
from op_registry.conformance.storages import check_storage_applies
from op_registry.conformance.subject import Subject
from op_registry.conformance.trees import tree_leaves
from op_registry.conformance.trial import Broken, NotAsked, Trial, observed, storage_of

# Why there may be nothing to ask of an operator.
NO_OPERAND = "no masked operand has a gradient"
A_PLAIN_RESULT = "a plain result is torch's own from there on"
# The masks of operands. (Results are left out as a whole by another one.)
KINDS = ("unstored", "half", "half_first", SHARED, ITSELF)


def nothing_comes_back(trial: Trial, storage: str | None = None) -> None:
    """P5 for operands whose results are all invalid by a mask that another operand has."""
    none = NotAsked(f"no derivative: {plain_torch.derivative(trial.sample, trial.seed).why}")
    by_rule = only_its_rule_may_have_one(trial)
    if trial.derivative_order == 0 and not by_rule:
        raise none
    if storage is not None:
        check_storage_applies(trial, storage)
    try:
        _check(trial, storage)
    except Exception as error:
        if by_rule and plain_torch.says_that_there_is_none(str(error)):  # the rule calls the operator itself
            raise none from None
        raise


def _check(trial: Trial, storage: str | None) -> None:
    subject = trial.subject
    _, _, values = trial.wrapped(gradients=True, storage=storage)
    masked = [subject.requires_grad(v) and subject.observe(v)[1] is not None for v in values]
    of_roots = [subject.call(_of_a_root, v) if own else v for v, own in zip(values, masked, strict=True)]
    remaining = iter(of_roots)
    args, kwargs = trial.sample.with_tensors(lambda _: next(remaining))
    results = tree_leaves(trial.sample.differentiable_part(trial.run(args, kwargs)), is_leaf=subject.is_value)
    results = [leaf for leaf in results if subject.is_value(leaf)]
    if not any(masked) or not any(map(subject.requires_grad, results)):
        raise NotAsked(NO_OPERAND)
    if any(subject.observe(result)[1] is None for result in results):
        raise NotAsked(A_PLAIN_RESULT)
    if not any(subject.observe(result)[0].numel() for result in results):
        raise NotAsked("the results have no elements that a mask could leave out")
    losses = [_left_out(subject, r, storage) for r in results if subject.requires_grad(r)]
    gradients = gradients_of(subject, observed(subject, losses), values)
    for position, (gradient, own) in enumerate(zip(gradients, masked, strict=True)):
        if own and gradient is not None:
            data, mask = gradient
            if mask is None or bool((data[mask] != 0).any()):
                raise Broken(f"gradient {position}: {data} comes back through results that are all invalid")


def _of_a_root(x: Any) -> Any:
    """The same values, with a derivative that is infinite everywhere."""
    return x + (x - x.detach()).sqrt()


def _left_out(subject: Subject, result: Any, storage: str | None) -> Any:
    """The sum of a result that masks leave out as a whole: one on dense storage, and one on `storage`."""
    data = subject.observe(result)[0].detach()
    mask = subject.wrap(torch.zeros_like(data), torch.zeros_like(data, dtype=torch.bool))
    masks = [mask] if storage is None else [mask, subject.stored(mask, storage_of(storage)[0], False)]
    return subject.call(lambda *given: sum((given[0] + other).sum() for other in given[1:]), result, *masks)
