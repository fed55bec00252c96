"""P6: views alias their base, in data and mask. P7: the same results in every mode of the subject."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.conformance.compare import Outcome, Tolerance, difference, mask_difference, outcome_difference
from op_registry.conformance.law import Broken, Law, NotAsked, Refusal, Trial, gradients_of, observed
from op_registry.conformance.masks import KNOWN_ZERO, PARTIAL, PLAIN, Masking, masking
from op_registry.conformance.own_operators import OwnForm, RegisteredOperator
from op_registry.conformance.plain_torch import one_line
from op_registry.conformance.sample import Operator, Sample, start_random_numbers, tree_leaves, tree_map
from op_registry.conformance.samples import DatabaseOperator, DirectOperator, overloads_called
from op_registry.conformance.subject import Observed
from op_registry.errors import MaskedSemanticsError
from op_registry.schema import is_view

# Compiled modes fuse operators and sum in another order.
MODE_ROUNDING = 1e-4


def _views_of(result: object, tensors: list[Tensor]) -> list[tuple[int, int]]:
    """(index of the result, index of the tensor) for every result that is a view of a tensor."""
    storages = {t.untyped_storage().data_ptr(): n for n, t in enumerate(tensors) if t.numel()}
    views = []
    for position, leaf in enumerate(tree_leaves(result)):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.numel() and leaf._is_view():
            base = storages.get(leaf.untyped_storage().data_ptr())
            if base is not None:
                views.append((position, base))
    return views


def views_alias(trial: Trial) -> None:
    """P6: writes through a view show in its base, in data and mask, and vice versa."""
    args, kwargs, tensors = trial.sample.copies()
    start_random_numbers(trial.seed)
    result = trial.sample.fn(*args, **kwargs)
    views = _views_of(result, tensors)
    if not views or any(t.requires_grad for t in tensors):
        raise NotAsked("no view")
    tested = False
    for position, base in views:
        leaf = tree_leaves(result)[position]
        if leaf is tensors[base] or trial.masks[base] is None:
            continue
        tested = True
        if leaf.dtype is not tensors[base].dtype:
            # Without a stored mask there is nothing that a write could leave inconsistent.
            if trial.masking.kind != "unstored":
                _write_is_refused(trial, position)
            continue
        numbers = _view_index(leaf, tensors[base])
        if numbers is not None:
            _write_through(trial, position, base, numbers)
    if not tested:
        raise NotAsked("no view of a masked tensor")


def _view_index(view: Tensor, base: Tensor) -> Tensor | None:
    """For each element of the base, the flat index of the view's element that aliases it, or -1.

    None if the view cannot be written to.
    """
    try:
        with torch.no_grad():
            view.copy_(torch.zeros_like(view))
    except RuntimeError:
        return None
    # An int64 tensor with the geometry of the base's storage: the sample's own dtype may not hold every index.
    storage = torch.full((base.untyped_storage().nbytes() // base.element_size(),), -1, dtype=torch.int64)
    storage.as_strided(view.shape, view.stride(), view.storage_offset()).copy_(
        torch.arange(view.numel()).reshape(view.shape)
    )
    return storage.as_strided(base.shape, base.stride(), base.storage_offset()).clone()


def _write_is_refused(trial: Trial, position: int) -> None:
    """Broken unless writing through a view of another dtype, which has a mask of its own, is refused."""
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
    data, mask_before = subject.observe(values[base])
    data = data.detach().clone()
    if mask_before is None:
        raise Broken("a wrapped tensor is observed as a plain one")
    shape, dtype = subject.observe(view)[0].shape, data.dtype
    number = torch.ones((), dtype=dtype)
    source_mask = torch.arange(int(numbers.max()) + 1).remainder(3).ne(1).reshape(shape)
    source = number.expand(shape).clone()
    # copy_ of a masked source writes values and validity to the base …
    subject.call(torch.Tensor.copy_, view, subject.wrap(source, source_mask))
    where = numbers.clamp_min(0)
    _base_is(
        f"result {position}, copied into",
        subject.observe(values[base]),
        torch.where(touched, number, data),
        torch.where(touched, source_mask.reshape(-1)[where], mask_before),
    )
    # … zero_ makes the written elements valid …
    subject.call(torch.Tensor.zero_, view)
    _base_is(
        f"result {position}, set to zero",
        subject.observe(values[base]),
        torch.where(touched, torch.zeros((), dtype=dtype), data),
        touched | mask_before,
    )
    # … and writes to the base show in the view.
    subject.call(torch.Tensor.copy_, values[base], subject.wrap(torch.ones_like(data), ~touched))
    view_data, view_mask = subject.observe(view)
    if view_mask is None or bool(view_mask.any()):
        raise Broken(f"result {position}: writing into the base does not show in the view ({view_data.shape})")


def _base_is(name: str, observed_base: Observed, data: Tensor, mask: Tensor) -> None:
    base_data, base_mask = observed_base
    if base_mask is None:
        raise Broken(f"{name}: the base is plain")
    wrong = mask_difference(base_mask, mask) or difference(base_data, data, mask)
    if wrong:
        raise Broken(f"{name}: in the base, {wrong}")


NAME = "profile_guard_manager"


def _no_time(*arguments: object) -> float:
    return 0.0


@contextlib.contextmanager
def guards_not_timed() -> Iterator[None]:
    """Inside, Dynamo does not time its guards, a number that it only logs.

    Before it measures, it flushes the processor's caches, which takes a tenth of the time of a small compilation.
    """
    kernel = getattr(torch._C._dynamo.guards, NAME, None)
    _use(_no_time, instead_of=kernel)
    try:
        yield
    finally:
        _use(kernel, instead_of=_no_time)


def _use(function: object, instead_of: object) -> None:
    """Replace a function in the module that Dynamo imports it from and, if Dynamo is loaded, in Dynamo's module."""
    for module in (torch._C._dynamo.guards, sys.modules.get("torch._dynamo.guards")):
        if instead_of is not None and getattr(module, NAME, None) is instead_of:
            setattr(module, NAME, function)


@guards_not_timed()
def modes_agree(trial: Trial, mode: str) -> None:
    """P7: the same masks, values and gradients in `mode` as in eager, and no recompilation for another mask."""
    mode_subject = trial.subject.modes().get(mode)
    if mode_subject is None:
        raise NotAsked(f"{trial.subject.name} has no mode {mode}")
    in_mode = Trial(mode_subject, trial.sample, trial.masking, trial.seed)
    differentiable = trial.derivative_order > 0
    try:
        want = _results_and_gradients(trial, differentiable)
    except MaskedSemanticsError as error:
        raise Refusal(str(error)) from error
    try:
        _check_outcome(mode, _results_and_gradients(in_mode, differentiable), want, trial)
    except Exception:
        why = _plain_error_in(in_mode)
        if why is not None:
            raise NotAsked(f"plain torch cannot do it in mode {mode} either: {why}") from None
        if not differentiable or _plain_gradients_agree(trial, in_mode):
            raise
        # In this mode, plain torch's gradients are missing or differ from eager: compare the results alone.
        _check_outcome(mode, _results_and_gradients(in_mode, False), (want[0], []), trial)
    if _returns_a_view(trial.sample):
        _check_views_inside(trial, in_mode, mode)
    _check_another_mask(trial, in_mode, mode)


def _returns_a_view(sample: Sample) -> bool:
    args, kwargs, tensors = sample.copies()
    return bool(_views_of(sample.fn(*args, **kwargs), tensors))


def _check_views_inside(trial: Trial, in_mode: Trial, mode: str) -> None:
    """Compare views as they are within the graph, by copying them there; torch recreates returned views outside it."""

    def copied(*args: Any, **kwargs: Any) -> Any:
        return tree_map(
            lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, trial.sample.fn(*args, **kwargs)
        )

    sample = dataclasses.replace(trial.sample, fn=copied)
    got, want = (_results_and_gradients(Trial(t.subject, sample, t.masking, t.seed), False) for t in (in_mode, trial))
    _check_outcome(f"{mode}, copied inside", got, want, trial)


def _check_another_mask(trial: Trial, in_mode: Trial, mode: str) -> None:
    """Broken unless the graph compiled for one mask is right for another one, without a recompilation."""
    masks = masking(trial.masking.kind, trial.sample.tensors, trial.seed + 1)
    if masks is None or masks.kind not in PARTIAL:
        return
    second = Trial(trial.subject, trial.sample, masks, trial.seed)
    want = _results_and_gradients(second, False)
    args, kwargs, values = in_mode.wrapped(KNOWN_ZERO)
    in_mode.remember_zero(values)
    second_call = Trial(in_mode.subject, second.sample, second.masking, second.seed).wrapped()[:2]
    try:
        result = in_mode.subject.call_twice(
            trial.sample.fn, (args, kwargs), second_call, lambda: start_random_numbers(trial.seed)
        )
        for value in values:  # a graph's write to an operand must end the facts remembered about it
            in_mode.subject.check_remembered(value)
    except Exception as error:
        raise Broken(f"{mode}, called again with another mask: {one_line(error)}") from error
    _check_outcome(f"{mode}, called again with another mask", (observed(in_mode.subject, result), []), want, trial)


def _check_outcome(name: str, got: Outcome, want: Outcome, trial: Trial) -> None:
    wrong = outcome_difference(got, want, Tolerance(relative=MODE_ROUNDING, values=not trial.sample.valueless))
    if wrong:
        raise Broken(f"{name}: {wrong}")


def _on_plain_tensors(trial: Trial) -> Trial:
    masks = Masking("plain", tuple(PLAIN for _ in trial.sample.tensors))
    return Trial(trial.subject, trial.sample, masks, trial.seed)


def _plain_error_in(in_mode: Trial) -> str | None:
    """The mode's error when it runs the call on plain tensors; None if it runs."""
    try:
        _results_and_gradients(_on_plain_tensors(in_mode), False)
    except Exception as error:
        return one_line(error)
    return None


def _plain_gradients_agree(trial: Trial, in_mode: Trial) -> bool:
    """Whether the gradients of the call on plain tensors are the same in this mode as in eager."""
    try:
        got, want = (_results_and_gradients(_on_plain_tensors(t), True) for t in (in_mode, trial))
        _check_outcome("plain", got, want, trial)
    except Exception:
        return False
    return True


def _results_and_gradients(trial: Trial, gradients: bool) -> Outcome:
    """Observed results and, if requested, gradients of the part that has a derivative."""
    args, kwargs, values = trial.wrapped(gradients=gradients)
    result = trial.run(args, kwargs)
    outcome = observed(trial.subject, result)
    if not gradients:
        return outcome, []
    part = observed(trial.subject, trial.sample.differentiable_part(result))
    return outcome, gradients_of(trial.subject, part, values)


def _no_view(operator: Operator, seed: int, silences: Mapping[str, int] | None) -> str | None:
    overloads = _overloads(operator)
    if any(is_view(op) for op in overloads):
        return None
    return "its schema returns no view" if len(overloads) == 1 else "none of its overloads' schemas returns a view"


def _overloads(operator: Operator) -> Sequence[OpOverload]:
    if isinstance(operator, OwnForm):
        return (operator.mutable,)
    if isinstance(operator, (RegisteredOperator, DirectOperator)):
        return (operator.op,)
    return overloads_called(operator.name.partition("+")[0]) if isinstance(operator, DatabaseOperator) else ()


LAWS = (
    Law("P6", "views alias", views_alias, masks=("unstored", "half", "empty", "broadcast"), exempt=_no_view),
    Law(
        "P7",
        "the same compiled",
        in_mode=modes_agree,
        masks=("half", "half_first", "slices"),
        whole=("unstored",),
    ),
)
