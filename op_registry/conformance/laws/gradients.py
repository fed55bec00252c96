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
from op_registry.conformance.compare import difference, first_difference, is_nonzero, mask_difference
from op_registry.conformance.law import (
    Broken,
    Law,
    NotAsked,
    Refusal,
    Trial,
    check_storage_applies,
    gradients_of,
    observed,
    storage_of,
)
from op_registry.conformance.masks import ITSELF, SHARED, masking
from op_registry.conformance.oracles import expected
from op_registry.conformance.oracles.call import Expected, NoOracle, Refused
from op_registry.conformance.oracles.pointwise import as_oracles_run
from op_registry.conformance.own_operators import OwnForm, RegisteredOperator
from op_registry.conformance.plain_torch import STEP, close_to_differences, weighted_sum, weighting
from op_registry.conformance.sample import Operator, chosen, start_random_numbers, tree_leaves
from op_registry.conformance.subject import Observed, Subject, zeros
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


def gradients_agree(trial: Trial, storage: str) -> None:
    """P5: gradients of first and second order are those of dense storage, which P5 compares with the oracle."""
    if trial.derivative_order == 0:
        raise NotAsked(f"no derivative: {plain_torch.derivative(trial.sample, trial.seed).why}")
    check_storage_applies(trial, storage)
    dense = trial.once("derivatives on dense storage", derivatives_or_refusal)
    stored = derivatives(trial, storage)
    for order, mine, theirs in zip(("gradient", "second-order gradient"), stored, dense, strict=True):
        if mine is not None and theirs is not None:
            wrong = first_difference(order, mine, theirs, dataclasses.replace(trial.tolerance, absent_is_zero=True))
            if wrong:
                raise Broken(f"stored as {storage}: {wrong}")
        elif any(map(is_nonzero, mine or theirs or ())):
            raise Broken(f"stored as {storage}: only one of this storage and dense storage has a {order}")


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

    shifted = trial.on_other_values(change=moved)
    args, kwargs, _ = shifted.wrapped(gradients=True)
    scalar = weighted_sum(observed(trial.subject, trial.sample.differentiable_part(shifted.run(args, kwargs))))
    return 0.0 if scalar is None else float(scalar.detach())


# How many samples we differentiate to find out whether an operator has a derivative.
TRIED = 12


def no_derivative(operator: Operator, seed: int, silences: Mapping[str, int] | None = None) -> str | None:
    """Why P5 does not apply to an operator."""
    if isinstance(operator, OwnForm) and operator.form == "out":
        return "an out= form has no derivative"
    dtype = operator.gradient_dtype
    if dtype is None:
        return "it has no derivative in float64"
    samples = [s for s in chosen(operator.samples(dtype), TRIED) if s.tensors]
    derivatives = [plain_torch.derivative(s, seed) for s in samples if plain_torch.forward(s, seed).error is None]
    if not derivatives or any(derivative.order for derivative in derivatives):
        return None
    why = next((d.why for d in derivatives if not plain_torch.says_that_there_is_none(d.why)), derivatives[0].why)
    if isinstance(operator, (OwnForm, RegisteredOperator)) and not plain_torch.says_that_there_is_none(why):
        return None  # the author's own formula raises
    return f"it has no derivative: {why}"


# ----------------------------------------------------------------------------------------------------------------------
# The law "later", of P5: where another operand's mask leaves all results out, operands get nothing back.

# Each masked operand comes from a square root of zeros, whose derivative is infinite at every element. If anything is
# multiplied with it, even a 0, the gradient is NaN.

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


def _nothing_to_leave_out(operator: Operator, seed: int, silences: Mapping[str, int] | None) -> str | None:
    nothing = [why for why in silences or () if why in (NO_OPERAND, A_PLAIN_RESULT)]
    return no_derivative(operator, seed) or next(iter(nothing), None)


LAWS = (
    Law(
        "P5",
        "gradients",
        gradients_are_derivatives,
        stored=gradients_agree,
        of_gradients=True,
        exempt=no_derivative,
    ),
    Law(
        "later",
        "what is masked later gets nothing back",
        nothing_comes_back,
        stored=nothing_comes_back,
        masks=KINDS,
        masks_stored=KINDS,
        of_gradients=True,
        exempt=_nothing_to_leave_out,
    ),
)
