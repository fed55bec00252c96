"""P5: gradients. Of a masked tensor masked with its mask, of a plain one plain; the true derivative, to second order.

The expected derivative is that of the oracle, by autograd through its loops; where there is no oracle, that of
the subject itself by central differences along a random direction, in float64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance import plain_torch
from op_registry.conformance.compare import difference, mask_difference
from op_registry.conformance.masks import masking
from op_registry.conformance.oracles import Expected, NoOracle, Refused, expected
from op_registry.conformance.plain_torch import weighted_sum, weighting
from op_registry.conformance.randomness import start_random_numbers
from op_registry.conformance.trees import tree_leaves
from op_registry.conformance.trial import Broken, NotAsked, Refusal, Trial, observed
from op_registry.errors import MaskedSemanticsError

ROUNDING = 1e-7
# Where a tensor among the arguments (a weight, say) has float32 whatever is asked for.
ROUNDING_NARROW = 1e-4
# As torch.autograd.gradcheck has them.
STEP, RELATIVE, ABSOLUTE = 1e-6, 1e-3, 1e-5


# First-order gradients, and second-order ones where there are any.
Derivatives = tuple[Sequence[Any], Sequence[Any] | None]


def gradients_are_derivatives(trial: Trial) -> None:
    """P5 at first order, and at second where torch has one."""
    if trial.derivative_order == 0:
        raise NotAsked(f"no derivative: {plain_torch.derivative(trial.sample, trial.seed).why}")
    mine = judged_derivatives(trial)
    first = mine[0]
    for position, (gradient, mask) in enumerate(zip(first, trial.masks, strict=True)):
        _masked_like_its_tensor(f"gradient {position}", gradient, mask)
    try:
        wanted = _derivatives_of(trial, expected)
    except (NoOracle, Refused) as reason:
        if isinstance(reason, Refused):
            return
        if trial.partial:
            _against_differences(trial, first)
            return
        wanted = _derivatives_of(trial, as_torch)
    if wanted is None:
        raise NotAsked("the oracle has no derivative")
    try:
        _same_derivatives(mine, wanted, trial)
    except Broken:
        # Some of torch's own gradients (repeated indices …) are not the derivative, by which ours are not to be judged.
        whole = _all_valid(trial)
        plainly = _derivatives_of(whole, as_torch)
        if plainly is None:
            raise
        if trial.partial:
            truly = _derivatives_of(whole, expected)
            if truly is not None and not _differ(_paired(plainly), truly, whole):
                raise
            raise NotAsked("plain torch's own gradient is not the derivative that the oracle has") from None
        _same_derivatives(mine, plainly, trial)


def _all_valid(trial: Trial) -> Trial:
    whole = masking("unstored", trial.sample.tensors)
    assert whole is not None
    return Trial(trial.subject, trial.sample, whole, trial.seed)


def _differ(mine: Derivatives, wanted: Derivatives, trial: Trial) -> bool:
    try:
        _same_derivatives(mine, wanted, trial)
    except Broken:
        return True
    return False


def _paired(derivatives: Derivatives) -> Derivatives:
    """Plain gradients as if they had been observed."""
    first, second = ([None if g is None else (g, None) for g in gs] if gs is not None else None for gs in derivatives)
    assert first is not None
    return first, second


def as_torch(fn: Callable[..., Any], args: Any, kwargs: Any, masks: object) -> Any:
    """In place of an oracle: plain torch, ignoring masks."""
    return fn(*args, **kwargs)


def _same_derivatives(mine: Derivatives, wanted: Derivatives, trial: Trial) -> None:
    narrow = any(t.is_floating_point() and t.element_size() < 8 for t in trial.sample.tensors)
    rounding = ROUNDING_NARROW if narrow else ROUNDING
    for order, got, want in (("gradient", mine[0], wanted[0]), ("second-order gradient", mine[1], wanted[1])):
        if want is None:
            continue
        for position, (g, w, mask) in enumerate(zip(got or [None] * len(want), want, trial.masks, strict=True)):
            _same_gradient(f"{order} {position}", g, w, mask, rounding)


def _masked_like_its_tensor(name: str, gradient: Any, mask: Tensor | None) -> None:
    if gradient is None:
        return
    data, got = gradient
    if mask is None:
        if got is not None:
            raise Broken(f"{name}: a masked gradient for a plain tensor")
        if type(data) is not Tensor:
            raise Broken(f"{name}: a {type(data).__name__} for a plain tensor")
        return
    if got is None:
        raise Broken(f"{name}: a plain gradient for a masked tensor")
    wrong = mask_difference(got, mask)
    if wrong:
        raise Broken(f"{name}: {wrong}")


def _same_gradient(name: str, got: Any, want: Tensor | None, mask: Tensor | None, rounding: float) -> None:
    where = mask
    if got is None:
        nothing = want is None or not bool((want if where is None else want[where]).any())
        if not nothing:
            raise Broken(f"{name}: none, although the result depends on the tensor")
        return
    data = got[0]
    reference = torch.zeros_like(data) if want is None else want.detach().to(data.dtype)
    # Where torch's own derivative of the compressed slice is NaN (0/0 at ties of NaN, …), a number may stand.
    reference = torch.where(reference.isnan(), data.detach(), reference)
    wrong = difference(data, reference, where, rounding)
    if wrong:
        raise Broken(f"{name}: {wrong}")


def judged_derivatives(trial: Trial) -> Derivatives:
    """:func:`derivatives` on dense storage; Refusal where a rule refuses."""
    try:
        return derivatives(trial)
    except MaskedSemanticsError as error:
        raise Refusal(str(error)) from error


def derivatives(trial: Trial, storage: str | None = None) -> Derivatives:
    """Observed gradients of the weighted results, and of the weighted gradients (None where torch has no such).

    Of results that do not require grad, every gradient is None, which is as good as zeros and nothing else.
    """
    args, kwargs, values = trial.wrapped(gradients=True, storage=storage)
    result = trial.sample.differentiable_part(trial.run(args, kwargs))
    scalar = weighted_sum(observed(trial.subject, result))
    if scalar is None:
        return [None] * len(values), None
    wanted = [trial.subject.requires_grad(v) for v in values]
    inputs = [v for v, w in zip(values, wanted, strict=True) if w]
    twice = trial.derivative_order > 1
    first = _with_none(trial.subject.gradients(scalar, inputs, create_graph=twice), wanted)
    seen = [None if g is None else trial.subject.observe(g) for g in first]
    again = _weighted_gradients(seen) if twice else None
    if again is None:
        return seen, None
    second = _with_none(trial.subject.gradients(again, inputs), wanted)
    return seen, [None if g is None else trial.subject.observe(g) for g in second]


def _with_none(gradients: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
    """The gradients of the tensors that have one, None for the others."""
    rest = iter(gradients)
    return [next(rest) if w else None for w in wanted]


def _weighted_gradients(gradients: Sequence[Any]) -> Tensor | None:
    parts = []
    for position, gradient in enumerate(gradients):
        if gradient is None or not gradient[0].requires_grad:
            continue
        data, mask = gradient
        kept = data if mask is None else torch.where(mask, data, torch.zeros((), dtype=data.dtype))
        part = (kept * weighting(data, 100 + position)).sum()
        parts.append(part.real if part.is_complex() else part)
    return sum(parts[1:], parts[0]) if parts else None


def _derivatives_of(
    trial: Trial, answer: Callable[..., Any]
) -> tuple[list[Tensor | None], list[Tensor | None] | None] | None:
    """The same two of the oracle, or of plain torch."""
    args, kwargs, tensors = trial.copies(gradients=True)
    known = trial.masks
    masks = {id(t): m for t, m in zip(tensors, known, strict=True) if m is not None}
    start_random_numbers(trial.seed)

    def part(*args: Any, **kwargs: Any) -> Any:
        return trial.sample.differentiable_part(trial.sample.fn(*args, **kwargs))

    outcome = [_pair(leaf) for leaf in tree_leaves(answer(part, args, kwargs, masks))]
    scalar = weighted_sum(outcome)
    if scalar is None:
        return None
    inputs = [t for t in tensors if t.requires_grad]
    wanted = [t.requires_grad for t in tensors]
    twice = trial.derivative_order > 1
    first = _with_none(torch.autograd.grad(scalar, inputs, create_graph=twice, allow_unused=True), wanted)
    again = (
        _weighted_gradients([None if g is None else (g, m) for g, m in zip(first, known, strict=True)])
        if twice
        else None
    )
    if again is None:
        return first, None
    return first, _with_none(torch.autograd.grad(again, inputs, allow_unused=True), wanted)


def _pair(leaf: object) -> Any:
    if isinstance(leaf, Expected):
        return leaf.data, leaf.mask
    return (leaf, None) if isinstance(leaf, Tensor) else leaf


def _against_differences(trial: Trial, gradients: Sequence[Any]) -> None:
    """The gradient along a random direction over valid elements, against central differences of the subject."""
    masks = trial.masks
    directions: list[Tensor | None] = []
    for position, (tensor, mask) in enumerate(zip(trial.sample.tensors, masks, strict=True)):
        if not tensor.is_floating_point() or not trial.may_have_gradient(position):
            directions.append(None)
            continue
        direction = weighting(tensor, 200 + position)
        directions.append(direction if mask is None else torch.where(mask, direction, torch.zeros_like(direction)))
    # Where plain torch's own derivative is not what differences give (kinks, ties), they say nothing.
    unmasked = _all_valid(trial)
    plainly = _derivatives_of(unmasked, as_torch)
    if plainly is not None:
        own = _directional([None if g is None else (g, None) for g in plainly[0]], directions)
        if not _close(own, _slope(unmasked, directions)):
            raise NotAsked("plain torch's own derivative is not what central differences give")
    along, slope = _directional(gradients, directions), _slope(trial, directions)
    if not _close(along, slope):
        raise Broken(f"the gradient along a direction is {along:.8g}, central differences give {slope:.8g}")


def _close(along: float, slope: float) -> bool:
    return abs(slope - along) <= ABSOLUTE + RELATIVE * abs(slope) or slope != slope


def _directional(gradients: Sequence[Any], directions: Sequence[Tensor | None]) -> float:
    """The directional derivative, from the gradients."""
    along = 0.0
    for gradient, direction in zip(gradients, directions, strict=True):
        if gradient is None or direction is None:
            continue
        data, mask = gradient
        kept = data if mask is None else torch.where(mask, data, torch.zeros_like(data))
        along += float((kept * direction).sum().detach().real)
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
