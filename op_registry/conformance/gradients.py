"""P5: a masked tensor has a gradient with its own mask, a plain tensor a plain one; both are the true derivative.

We compare first and second order with autograd through the oracle's loops. Without an oracle, we compare the first
order with central differences of the subject along a random direction, in float64; so also where the operator has no
derivative, and its rule has one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.conformance import plain_torch
from op_registry.conformance.compare import difference, mask_difference
from op_registry.conformance.laws import gradients_of
from op_registry.conformance.masks import masking
from op_registry.conformance.oracles import expected
from op_registry.conformance.oracles.call import Expected, NoOracle, Refused
from op_registry.conformance.oracles.python_functions import as_oracles_run
from op_registry.conformance.plain_torch import STEP, close_to_differences, weighted_sum, weighting
from op_registry.conformance.randomness import start_random_numbers
from op_registry.conformance.record_subject import zeros
from op_registry.conformance.subject import Observed
from op_registry.conformance.trees import tree_leaves
from op_registry.conformance.trial import Broken, NotAsked, Refusal, Trial, observed
from op_registry.errors import MaskedSemanticsError

ROUNDING = 1e-7
# For samples with a float32 tensor (a weight, say) whatever dtype was requested.
ROUNDING_NARROW = 1e-4
# The namespaces of torch's operators.
TORCHS_OWN = ("aten", "prims")

# One gradient for each tensor of the sample; None for a tensor without one.
Gradients = Sequence[Observed | None]
# First-order gradients, and second-order ones where torch has them.
Derivatives = tuple[Gradients, Gradients | None]


def gradients_are_derivatives(trial: Trial) -> None:
    """P5 at first order, and at second order where torch has one."""
    if trial.derivative_order == 0:
        _is_derivative_of_its_values(trial)
        return
    wrong = plain_torch.wrong_derivative(trial.sample, trial.seed) if _is_of_another_library(trial) else None
    if wrong and trial.masking.kind == "unstored":
        raise Broken(f"the operator's own derivative is wrong, not the rule's: {wrong}")
    observed_derivatives = derivatives_or_refusal(trial)
    first = observed_derivatives[0]
    for position, (gradient, mask) in enumerate(zip(first, trial.masks, strict=True)):
        masked_like_its_tensor(f"the rule's gradient {position}", gradient, mask)
    try:
        wanted = _derivatives_of(trial, expected)
    except (NoOracle, Refused) as reason:
        if isinstance(reason, Refused):
            return
        if trial.partial:
            _against_differences(trial, first)
            return
        wanted = _derivatives_of(trial, plain_result)
    if wanted is None:
        raise NotAsked("the oracle has no derivative")
    try:
        _same_derivatives(observed_derivatives, wanted, trial)
    except Broken:
        if wrong:
            raise NotAsked("the operator's own derivative, with which the rule's is compared, is wrong") from None
        # Some of torch's own gradients (with repeated indices, for example) are not the derivative. Don't count that
        # against the subject: compare with torch where all is valid, and skip the trial where something is invalid.
        whole = _all_valid(trial)
        from_torch = _derivatives_of(whole, plain_result)
        if from_torch is None:
            raise
        if trial.partial:
            from_oracle = _derivatives_of(whole, expected)
            if from_oracle is not None and not _differ(from_torch, from_oracle, whole):
                raise
            raise NotAsked("plain torch's own gradient differs from the oracle's derivative") from None
        _same_derivatives(observed_derivatives, from_torch, trial)


def _is_derivative_of_its_values(trial: Trial) -> None:
    """P5 of a call that plain torch cannot differentiate: a rule that has a gradient has that of its own values."""
    why = plain_torch.derivative(trial.sample, trial.seed).why
    none = NotAsked(f"no derivative: {why}")
    if not (trial.partial and only_its_rule_may_have_one(trial)):
        raise none
    try:
        first = derivatives_or_refusal(trial)[0]
    except Refusal:
        raise
    except Exception as error:
        if plain_torch.says_that_there_is_none(str(error)):  # the rule calls the operator itself
            raise none from None
        raise
    if all(gradient is None for gradient in first):
        raise none
    for position, (gradient, mask) in enumerate(zip(first, trial.masks, strict=True)):
        masked_like_its_tensor(f"the rule's gradient {position}", gradient, mask)
    _against_differences(trial, first)


def only_its_rule_may_have_one(trial: Trial) -> bool:
    """Whether the operator is another library's, without a derivative: the formula of its rule may have one."""
    why = plain_torch.derivative(trial.sample, trial.seed).why
    none = trial.derivative_order == 0 and trial.sample.differentiable and plain_torch.says_that_there_is_none(why)
    return none and _is_of_another_library(trial)


def _is_of_another_library(trial: Trial) -> bool:
    """Whether the call is a single operator of another library; torch itself tests the derivatives of its operators."""
    return isinstance(trial.sample.fn, OpOverload) and trial.sample.fn.namespace not in TORCHS_OWN


def _all_valid(trial: Trial) -> Trial:
    whole = masking("unstored", trial.sample.tensors)
    assert whole is not None
    return Trial(trial.subject, trial.sample, whole, trial.seed)


def _differ(got: Derivatives, want: Derivatives, trial: Trial) -> bool:
    try:
        _same_derivatives(got, want, trial)
    except Broken:
        return True
    return False


def plain_result(
    fn: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object], masks: Mapping[int, Tensor]
) -> Any:
    """Plain torch's result, without the masks; replaces an oracle."""
    return fn(*args, **kwargs)


def _same_derivatives(got: Derivatives, want: Derivatives, trial: Trial) -> None:
    narrow = any(t.is_floating_point() and t.element_size() < 8 for t in trial.sample.tensors)
    rounding = ROUNDING_NARROW if narrow else ROUNDING
    for order, gradients, references in zip(
        ("the rule's gradient", "the rule's second-order gradient"), got, want, strict=True
    ):
        if references is None:
            continue
        per_tensor = zip(gradients or [None] * len(references), references, trial.masks, strict=True)
        for position, (gradient, reference, mask) in enumerate(per_tensor):
            same_gradient(f"{order} {position}", gradient, reference, mask, rounding)


def masked_like_its_tensor(name: str, gradient: Observed | None, mask: Tensor | None) -> None:
    if gradient is None:
        return
    data, gradient_mask = gradient
    if mask is None:
        if gradient_mask is not None:
            raise Broken(f"{name}: a masked gradient for a plain tensor")
        if type(data) is not Tensor:
            raise Broken(f"{name}: a {type(data).__name__} for a plain tensor")
        return
    if gradient_mask is None:
        raise Broken(f"{name}: a plain gradient for a masked tensor")
    wrong = mask_difference(gradient_mask, mask)
    if wrong:
        raise Broken(f"{name}: {wrong}")


def same_gradient(name: str, got: Observed | None, want: Observed | None, mask: Tensor | None, rounding: float) -> None:
    if got is None:
        if want is not None and bool((want[0] if mask is None else want[0][mask]).any()):
            raise Broken(f"{name}: none, although the result depends on the tensor")
        return
    data = got[0]
    reference = torch.zeros_like(data) if want is None else want[0].detach().to(data.dtype)
    # Accept any value where torch's own derivative of the compressed slice is NaN (0/0 at ties of NaN, …).
    reference = torch.where(reference.isnan(), data.detach(), reference)
    wrong = difference(data, reference, mask, rounding)
    if wrong:
        raise Broken(f"{name}: {wrong}")


def derivatives_or_refusal(trial: Trial) -> Derivatives:
    """:func:`derivatives` on dense storage; raises Refusal if a rule refuses."""
    try:
        return derivatives(trial)
    except MaskedSemanticsError as error:
        raise Refusal(str(error)) from error


def derivatives(trial: Trial, storage: str | None = None) -> Derivatives:
    """Observed gradients of the weighted results, and of the weighted gradients (None where torch has no second order).

    Results that don't require grad have gradients of None, which the comparison accepts only where zeros are expected.
    """
    args, kwargs, values = trial.wrapped(gradients=True, storage=storage)
    outcome = observed(trial.subject, trial.sample.differentiable_part(trial.run(args, kwargs)))
    twice = trial.derivative_order > 1
    first = gradients_of(trial.subject, outcome, values, twice)
    second = gradients_of(trial.subject, first, values, seed=100) if twice else []
    return first or [None] * len(values), second or None


def _derivatives_of(trial: Trial, answer: Callable[..., Any]) -> Derivatives | None:
    """The gradients of both orders of the oracle (`answer` is `expected`) or of plain torch (`plain_result`)."""
    args, kwargs, tensors = trial.sample.copies(plain_torch.variables(trial.sample, trial.seed))
    masks = {id(t): m for t, m in zip(tensors, trial.masks, strict=True) if m is not None}
    start_random_numbers(trial.seed)

    function = as_oracles_run(trial.sample.fn) if answer is expected else trial.sample.fn

    def part(*args: Any, **kwargs: Any) -> Any:
        return trial.sample.differentiable_part(function(*args, **kwargs))

    outcome = [_pair(leaf) for leaf in tree_leaves(answer(part, args, kwargs, masks))]
    twice = trial.derivative_order > 1
    first = gradients_of(zeros, outcome, tensors, twice)
    if not first:
        return None
    masked = [None if g is None else (g[0], m) for g, m in zip(first, trial.masks, strict=True)]
    second = gradients_of(zeros, masked, tensors, seed=100) if twice else []
    return first, second or None


def _pair(leaf: object) -> Any:
    if isinstance(leaf, Expected):
        return leaf.data, leaf.mask
    return (leaf, None) if isinstance(leaf, Tensor) else leaf


def _against_differences(trial: Trial, gradients: Gradients) -> None:
    """Compare the gradient along a random direction over valid elements with central differences of the subject."""
    masks = trial.masks
    directions: list[Tensor | None] = []
    for position, (tensor, mask) in enumerate(zip(trial.sample.tensors, masks, strict=True)):
        if not tensor.is_floating_point() or not trial.may_have_gradient(position):
            directions.append(None)
            continue
        direction = weighting(tensor, 200 + position)
        directions.append(direction if mask is None else torch.where(mask, direction, torch.zeros_like(direction)))
    # Central differences are no reference where even plain torch's derivative disagrees with them (kinks, ties).
    unmasked = _all_valid(trial)
    from_torch = _derivatives_of(unmasked, plain_result) if trial.derivative_order else None
    if from_torch is not None and not close_to_differences(
        _directional(from_torch[0], directions), _slope(unmasked, directions)
    ):
        raise NotAsked("plain torch's own derivative differs from central differences")
    along, slope = _directional(gradients, directions), _slope(trial, directions)
    if not close_to_differences(along, slope):
        raise Broken(f"the rule's gradient along a direction is {along:.8g}, central differences give {slope:.8g}")


def _directional(gradients: Gradients, directions: Sequence[Tensor | None]) -> float:
    """The directional derivative, from the gradients."""
    along = 0.0
    for gradient, direction in zip(gradients, directions, strict=True):
        if gradient is None or direction is None:
            continue
        data, mask = gradient
        filled = data if mask is None else torch.where(mask, data, torch.zeros_like(data))
        along += float((filled * direction).sum().detach().real)
    return along


def _slope(trial: Trial, directions: Sequence[Tensor | None]) -> float:
    """The directional derivative, from central differences of the subject's values."""
    ahead, behind = (_scalar_at(trial, directions, sign * STEP) for sign in (1, -1))
    return (ahead - behind) / (2 * STEP)


def _scalar_at(trial: Trial, directions: Sequence[Tensor | None], step: float) -> float:
    steps = dict(zip(map(id, trial.sample.tensors), directions, strict=True))

    def moved(tensor: Tensor) -> Tensor:
        direction = steps[id(tensor)]
        return tensor if direction is None else tensor.detach() + step * direction

    args, kwargs = trial.sample.with_tensors(moved)
    sample = dataclasses.replace(trial.sample, args=args, kwargs=kwargs)
    shifted = Trial(trial.subject, sample, trial.masking, trial.seed)
    wrapped_args, wrapped_kwargs, _ = shifted.wrapped(gradients=True)
    result = sample.differentiable_part(shifted.run(wrapped_args, wrapped_kwargs))
    scalar = weighted_sum(observed(trial.subject, result))
    return 0.0 if scalar is None else float(scalar.detach())
