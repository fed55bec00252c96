"""P5 for what is masked later: where another operand's mask leaves all results out, operands get nothing back.

Each masked operand comes from a square root of zeros, whose derivative is infinite at every element. If anything is
multiplied with it, even a 0, the gradient is NaN.
"""

from __future__ import annotations

from typing import Any

import torch

from op_registry.conformance import plain_torch
from op_registry.conformance.subject import Subject
from op_registry.conformance.trees import tree_leaves
from op_registry.conformance.trial import Broken, NotAsked, Trial


def nothing_comes_back(trial: Trial, storage: str | None = None) -> None:
    """P5 for operands whose results are all invalid by a mask that another operand has."""
    if trial.derivative_order == 0:
        raise NotAsked(f"no derivative: {plain_torch.derivative(trial.sample, trial.seed).why}")
    subject = trial.subject
    _, _, values = trial.wrapped(gradients=True, storage=storage)
    operands = [v for v in values if subject.requires_grad(v) and subject.observe(v)[1] is not None]
    steep = iter([_steep(v) if any(v is o for o in operands) else v for v in values])
    args, kwargs = trial.sample.with_tensors(lambda _: next(steep))
    result = trial.sample.differentiable_part(trial.run(args, kwargs))
    leaves = [v for v in tree_leaves(result, is_leaf=subject.is_value) if subject.is_value(v)]
    losses = [_hidden(subject, v) for v in leaves if subject.requires_grad(v)]
    if not operands or not losses:
        raise NotAsked("no masked operand has a gradient")
    if any(subject.observe(v)[1] is None for v in leaves):
        raise NotAsked("a plain result is torch's own from there on")
    roots = [torch.ones_like(loss.detach()) for loss in losses]  # torch makes none for complex numbers
    for position, gradient in enumerate(torch.autograd.grad(losses, operands, roots, allow_unused=True)):
        if gradient is not None:
            data, mask = subject.observe(gradient)
            if mask is None or bool((data[mask] != 0).any()):
                raise Broken(f"gradient {position}: {data} comes back through results that are all invalid")


def _steep(x: Any) -> Any:
    """The same values, of an operator whose derivative is infinite everywhere."""
    return x + (x - x.detach()).sqrt()


def _hidden(subject: Subject, result: Any) -> Any:
    """The sum of a result that a mask leaves out as a whole."""
    data, mask = subject.observe(result)
    if mask is None:
        return result.sum()
    return (result + subject.wrap(torch.zeros_like(data), torch.zeros_like(mask))).sum()
