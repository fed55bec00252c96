"""P6, views alias their base in data and mask; P7, the same answers in every mode that the subject can be run in."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.compare import difference, mask_difference
from op_registry.conformance.laws import gradients_of
from op_registry.conformance.masks import PARTIAL, PLAIN, Masking, masking
from op_registry.conformance.plain_torch import said
from op_registry.conformance.randomness import start_random_numbers
from op_registry.conformance.sample import Sample
from op_registry.conformance.trees import tree_leaves, tree_map
from op_registry.conformance.trial import Broken, NotAsked, Refusal, Trial, observed
from op_registry.errors import MaskedSemanticsError

# Modes compute in another order, and fuse.
MODE_ROUNDING = 1e-4

# Results, and gradients.
Outcome = tuple[list[Any], list[Any]]


def _views_of(result: object, tensors: list[Tensor]) -> list[tuple[int, int]]:
    """(which result, which tensor) for every result that shares memory with a tensor."""
    storages = {t.untyped_storage().data_ptr(): n for n, t in enumerate(tensors) if t.numel()}
    found = []
    for position, leaf in enumerate(tree_leaves(result)):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.numel() and leaf._is_view():
            base = storages.get(leaf.untyped_storage().data_ptr())
            if base is not None:
                found.append((position, base))
    return found


def views_alias(trial: Trial) -> None:
    """P6: what is written through a view shows in its base, data and mask, and the other way round."""
    args, kwargs = trial.sample.with_tensors(lambda t: t.detach().clone())
    tensors = _distinct(args, kwargs)
    start_random_numbers(trial.seed)
    result = trial.sample.fn(*args, **kwargs)
    views = _views_of(result, tensors)
    if not views or any(t.requires_grad for t in tensors):
        raise NotAsked("no view")
    asked = False
    for position, base in views:
        leaf = tree_leaves(result)[position]
        if leaf is tensors[base] or trial.masks[base] is None:
            continue
        asked = True
        if leaf.dtype is not tensors[base].dtype:
            # Without a stored mask there is none that could go astray.
            if trial.masking.kind != "unstored":
                _write_is_refused(trial, position)
            continue
        numbers = _numbered(leaf, tensors[base])
        if numbers is not None:
            _write_through(trial, position, base, numbers)
    if not asked:
        raise NotAsked("no view of a masked tensor")


def _distinct(args: object, kwargs: object) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            found.setdefault(id(leaf), leaf)
    return list(found.values())


def _numbered(view: Tensor, base: Tensor) -> Tensor | None:
    """For each element of the base the number of the view's element that is written there, or -1 (None: no writing)."""
    try:
        with torch.no_grad():
            view.copy_(torch.zeros_like(view))
    except RuntimeError:
        return None
    # Numbers are written one by one: the sample's dtype may hold few of them.
    place = torch.full((base.untyped_storage().nbytes() // base.element_size(),), -1, dtype=torch.int64)
    place.as_strided(view.shape, view.stride(), view.storage_offset()).copy_(
        torch.arange(view.numel()).reshape(view.shape)
    )
    return place.as_strided(base.shape, base.stride(), base.storage_offset()).clone()


def _write_is_refused(trial: Trial, position: int) -> None:
    """A view of another dtype has a mask of its own: writing through it is refused."""
    args, kwargs, _ = trial.wrapped()
    view = _leaf(trial, trial.run(args, kwargs), position)
    try:
        trial.subject.call(torch.Tensor.zero_, view)
    except MaskedSemanticsError:
        return
    raise Broken(f"result {position}: writing through a view of another dtype is not refused")


def _leaf(trial: Trial, result: object, position: int) -> Any:
    return tree_leaves(result, is_leaf=trial.subject.is_value)[position]


def _write_through(trial: Trial, position: int, base: int, numbers: Tensor) -> None:
    subject = trial.subject
    args, kwargs, values = trial.wrapped()
    view = _leaf(trial, trial.run(args, kwargs), position)
    touched = numbers >= 0
    data, before = subject.observe(values[base])
    data, before = data.detach().clone(), before
    if before is None:
        raise Broken("a wrapped tensor is observed as a plain one")
    shape, dtype = subject.observe(view)[0].shape, data.dtype
    number = torch.ones((), dtype=dtype)
    source_mask = torch.arange(int(numbers.max()) + 1).remainder(3).ne(1).reshape(shape)
    source = number.expand(shape).clone()
    # A masked source: value and validity arrive in the base …
    subject.call(torch.Tensor.copy_, view, subject.wrap(source, source_mask))
    where = numbers.clamp_min(0)
    _base_is(
        f"result {position}, copied into",
        subject.observe(values[base]),
        torch.where(touched, number, data),
        torch.where(touched, source_mask.reshape(-1)[where], before),
    )
    # … assignment makes what it writes valid …
    subject.call(torch.Tensor.zero_, view)
    _base_is(
        f"result {position}, set to zero",
        subject.observe(values[base]),
        torch.where(touched, torch.zeros((), dtype=dtype), data),
        touched | before,
    )
    # … and what is written to the base shows in the view.
    subject.call(torch.Tensor.copy_, values[base], subject.wrap(torch.ones_like(data), ~touched))
    seen, mask = subject.observe(view)
    if mask is None or bool(mask.any()):
        raise Broken(f"result {position}: writing into the base does not show in the view ({seen.shape})")


def _base_is(name: str, got: tuple[Tensor, Tensor | None], data: Tensor, mask: Tensor) -> None:
    if got[1] is None:
        raise Broken(f"{name}: the base is plain")
    wrong = mask_difference(got[1], mask) or difference(got[0], data, mask)
    if wrong:
        raise Broken(f"{name}: in the base, {wrong}")


def modes_agree(trial: Trial, mode: str) -> None:
    """P7: the same masks, values and gradients in `mode` as in the subject itself; one compiled graph for any mask."""
    other = trial.subject.modes().get(mode)
    if other is None:
        raise NotAsked(f"{trial.subject.name} has no mode {mode}")
    theirs = Trial(other, trial.sample, trial.masking, trial.seed)
    differentiable = trial.derivative_order > 0
    try:
        want = _both(trial, differentiable)
    except MaskedSemanticsError as error:
        raise Refusal(str(error)) from error
    try:
        _agree_in_all(mode, _both(theirs, differentiable), want, trial)
    except Exception:
        why = _plain_error_in(theirs)
        if why is not None:
            raise NotAsked(f"plain torch cannot do it in mode {mode} either: {why}") from None
        if not differentiable or _plain_gradients_agree(trial, theirs):
            raise
        # Plain torch has other gradients in this mode than in eager, or none: results alone are compared.
        _agree_in_all(mode, _both(theirs, False), (want[0], []), trial)
    if _gives_a_view(trial.sample):
        _views_are_right_inside(trial, theirs, mode)
    _serves_another_mask(trial, theirs, mode)


def _gives_a_view(sample: Sample) -> bool:
    args, kwargs = sample.with_tensors(lambda t: t.detach().clone())
    return bool(_views_of(sample.fn(*args, **kwargs), _distinct(args, kwargs)))


def _views_are_right_inside(trial: Trial, theirs: Trial, mode: str) -> None:
    """A graph that returns a view has torch take it anew outside; what it was inside shows in a copy."""

    def copied(*args: Any, **kwargs: Any) -> Any:
        return tree_map(
            lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, trial.sample.fn(*args, **kwargs)
        )

    sample = dataclasses.replace(trial.sample, fn=copied)
    eager, other = (Trial(t.subject, sample, t.masking, t.seed) for t in (trial, theirs))
    _agree_in_all(f"{mode}, copied inside", _both(other, False), _both(eager, False), trial)


def _serves_another_mask(trial: Trial, theirs: Trial, mode: str) -> None:
    """What was compiled for one mask gives the right answer for another, and is not compiled anew."""
    masks = masking(trial.masking.kind, trial.sample.tensors, trial.seed + 1)
    if masks is None or masks.kind not in PARTIAL:
        return
    second = Trial(trial.subject, trial.sample, masks, trial.seed)
    want = _both(second, False)
    first_call, second_call = (
        Trial(theirs.subject, t.sample, t.masking, t.seed).wrapped()[:2] for t in (trial, second)
    )
    try:
        result = theirs.subject.call_twice(
            trial.sample.fn, first_call, second_call, lambda: start_random_numbers(trial.seed)
        )
    except Exception as error:
        raise Broken(f"{mode}, called again with another mask: {said(error)}") from error
    _agree_in_all(f"{mode}, called again with another mask", (observed(theirs.subject, result), []), want, trial)


def _agree_in_all(name: str, got: Outcome, want: Outcome, trial: Trial) -> None:
    for what, mine, theirs in zip(("result", "gradient"), got, want, strict=True):
        if len(mine) != len(theirs):
            raise Broken(f"{name}: {len(mine)} {what}s instead of {len(theirs)}")
        for position, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            _agree(f"{name}: {what} {position}", a, b, trial.sample.valueless)


def _plainly(trial: Trial) -> Trial:
    masks = Masking("plain", tuple(PLAIN for _ in trial.sample.tensors))
    return Trial(trial.subject, trial.sample, masks, trial.seed)


def _plain_error_in(theirs: Trial) -> str | None:
    """What the mode says where it cannot run the call on plain tensors; None where it can."""
    try:
        _both(_plainly(theirs), False)
    except Exception as error:
        return said(error)
    return None


def _plain_gradients_agree(trial: Trial, theirs: Trial) -> bool:
    """Whether the mode differentiates the call on plain tensors, as eager does."""
    try:
        _agree_in_all("plain", _both(_plainly(theirs), True), _both(_plainly(trial), True), trial)
    except Exception:
        return False
    return True


def _agree(name: str, got: object, want: object, valueless: bool) -> None:
    if not isinstance(got, tuple) or not isinstance(want, tuple):
        if got is not want and got != want and not (got != got and want != want):
            raise Broken(f"{name} is {got!r} instead of {want!r}")
        return
    if (got[1] is None) != (want[1] is None):
        raise Broken(f"{name} is {'plain' if got[1] is None else 'masked'}, otherwise it is not")
    wrong = mask_difference(got[1], want[1]) if got[1] is not None else None
    if not wrong and not valueless:
        wrong = difference(got[0], want[0], got[1], MODE_ROUNDING if want[0].is_floating_point() else None)
    if wrong:
        raise Broken(f"{name}: {wrong}")


def _both(trial: Trial, gradients: bool) -> Outcome:
    """Results and gradients (none where they are not asked for), observed."""
    args, kwargs, values = trial.wrapped(gradients=gradients)
    outcome = observed(trial.subject, trial.run(args, kwargs))
    return outcome, gradients_of(trial.subject, outcome, values) if gradients else []
