"""P1, P2 and P8: with every element valid, plain torch's results; else the oracle's, masked; or a refusal."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.conformance.compare import (
    Observed,
    Tolerance,
    bit_difference,
    difference,
    mask_difference,
    repeats_itself,
    value_difference,
)
from op_registry.conformance.law import Broken, Case, Law, NotAsked, Refusal, RefusedRightly, Trial
from op_registry.conformance.masks import PARTIAL, WHOLE, masking
from op_registry.conformance.oracles import by_category
from op_registry.conformance.oracles.call import Expected, NoOracle, Refused
from op_registry.conformance.plain_torch import calls_of, levelled, one_line
from op_registry.conformance.sample import Operator, Sample, tree_leaves
from op_registry.conformance.samples import DatabaseOperator
from op_registry.conformance.subject import Subject
from op_registry.conformance.variations import with_other_numbers
from op_registry.errors import MaskedSemanticsError
from op_registry.laws.categories import REDUCTION
from op_registry.registry import registry
from op_registry.resolve import resolve
from op_registry.rule import packet_name, path_in_package
from op_registry.sparse.lowering import OnCall, ways_of

if TYPE_CHECKING:
    from op_registry.conformance.trials import Settings


def all_valid_identity(trial: Trial) -> None:
    """P1: with every element valid, the result is plain torch's: values, dtype, shape, and strides of views."""
    if trial.partial:
        raise NotAsked("something is invalid")
    if trial.masking.kind == "unstored":  # the first trial of these operands
        _make_earlier_calls(trial)
    want = tree_leaves(trial.plain())
    bitwise = trial.masking.kind == "unstored"
    for position, mine, plain in _tensors(trial.outcome(), want):
        _same_as_plain(position, mine, plain, bitwise, trial)


def _tensors(got: list[Any], want: list[Any]) -> Iterator[tuple[int, Observed, Any]]:
    """Each tensor among the results, and what is wanted of it; Broken unless other values are equal."""
    if len(got) != len(want):
        raise Broken(f"{len(got)} results instead of {len(want)}")
    for position, (mine, wanted) in enumerate(zip(got, want, strict=True)):
        if isinstance(wanted, (Tensor, Expected)):
            if not isinstance(mine, tuple):
                raise Broken(f"result {position}: {mine!r} instead of a tensor")
            yield position, mine, wanted
        elif wrong := value_difference(mine, wanted, Tolerance()):
            raise Broken(f"result {position}: {wrong}")


def _make_earlier_calls(trial: Trial) -> None:
    """Make the call on other tensors, with other numbers and with its own.

    A rule's caches from these calls must not affect the call under test.
    """
    renumbered = dataclasses.replace(trial, sample=with_other_numbers(trial.sample, trial.seed))
    different = [renumbered] if renumbered.sample is not trial.sample else []
    for earlier in map(_on_distinguishing_values, (*different, trial)):
        with contextlib.suppress(Exception):  # the changed values may lie outside the operator's domain
            args, kwargs, _ = earlier.wrapped()
            earlier.run(args, kwargs)


def _on_distinguishing_values(trial: Trial) -> Trial:
    """The call on values for which plain torch gives another result.

    We try reversed values first. They don't change every result (a reversed matrix keeps its rank).
    """
    reverse = trial.on_other_values()
    with contextlib.suppress(Exception):
        return trial.on_other_values(change=levelled) if _same_results(reverse.plain(), trial.plain()) else reverse
    return reverse


def _same_results(mine: object, theirs: object) -> bool:
    pairs = zip(tree_leaves(mine), tree_leaves(theirs), strict=True)
    return all(not bit_difference(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def _plain_repeats_itself(trial: Trial, position: int, plain: Tensor) -> bool:
    return repeats_itself(
        lambda: tree_leaves(trial.plain())[position].clone(), plain, lambda a, b: not bit_difference(a, b)
    )


def _same_as_plain(position: int, mine: Observed, plain: Tensor, bitwise: bool, trial: Trial) -> None:
    name, (data, mask) = f"result {position}", mine
    if plain.layout is not torch.strided:
        raise NotAsked(f"the result is {plain.layout}")
    if trial.sample.uninitialised:
        if plain.numel() and (mask is None or bool(mask.any())):
            raise Broken(f"{name}: valid elements in uninitialised memory")
    elif mask is not None and not bool(mask.all()):
        raise Broken(
            f"{name}: invalid elements although every operand is valid: {mask_difference(mask, torch.ones_like(mask))}"
        )
    if trial.sample.valueless:
        if data.shape != plain.shape or data.dtype is not plain.dtype:
            raise Broken(f"{name}: {data.dtype} {tuple(data.shape)} instead of {plain.dtype} {tuple(plain.shape)}")
        return
    wrong = bit_difference(data, plain) if bitwise else None
    if not bitwise or (wrong and not _plain_repeats_itself(trial, position, plain)):
        wrong = difference(data, plain, magnitude=trial.magnitude, coarsest=trial.rounding)
    if wrong and not (not bitwise and equally_right(trial.sample, position, data, plain)):
        raise Broken(f"{name}: {wrong}")
    if plain._is_view() and plain.numel():
        mine_strides, strides = ([t.stride(d) for d in range(t.ndim) if t.shape[d] > 1] for t in (data, plain))
        if mine_strides != strides:
            raise Broken(f"{name}: strides {data.stride()} instead of {plain.stride()} for shape {tuple(plain.shape)}")


def same_errors(trial: Trial) -> None:
    """P1 for calls on which plain torch raises: the same exception, with every tensor masked and valid."""
    try:
        trial.plain()
    except Exception as error:
        wanted = error
    else:
        raise NotAsked("plain torch does not raise on this machine")
    try:
        trial.outcome()
    except MaskedSemanticsError as error:
        raise Refusal(str(error)) from error
    except Exception as error:
        if isinstance(error, type(wanted)):
            return
        raise Broken(f"{one_line(error)}, instead of {one_line(wanted)}") from error
    raise Broken(f"no error, instead of {one_line(wanted)}")


def error_cases(operator: Operator, subject: Subject, settings: Settings) -> Iterator[Case]:
    """The calls on which torch raises, as cases of P1."""
    if settings.sample is not None or not subject.own_errors:
        return
    if not isinstance(operator, DatabaseOperator) or not operator.leading:
        return
    for sample in operator.error_samples():
        masks = masking("unstored", sample.tensors) if sample.tensors else None
        if masks is not None:
            trial = Trial(subject, sample, masks)
            description = f"{str(sample.dtype).removeprefix('torch.')} error {sample.number} unstored"
            yield Case(description, functools.partial(same_errors, trial), trial=trial, plain_raises=True)


def compress(trial: Trial) -> None:
    """P2, P8: valid values and masks equal the oracle's; the subject refuses the calls that the oracle refuses."""
    try:
        want = trial.expected()
    except Refused as reason:
        try:
            trial.outcome()
        except MaskedSemanticsError:
            raise RefusedRightly(str(reason)) from None
        raise Broken(f"a result, although the semantics refuse {reason}") from None
    except NoOracle as reason:
        raise NotAsked(f"no oracle: {reason}") from None
    for position, mine, theirs in _tensors(trial.outcome(), want):
        _same_as_expected(position, mine, theirs, trial)


def _same_as_expected(position: int, mine: Observed, theirs: Tensor | Expected, trial: Trial) -> None:
    name, (data, mask) = f"result {position}", mine
    if isinstance(theirs, Tensor):
        # A plain result is expected; a masked one without invalid elements is equivalent.
        if mask is not None and not bool(mask.all()):
            raise Broken(f"{name}: invalid elements where a plain result is expected")
        wrong = None if trial.sample.valueless else difference(data, theirs)
        if wrong:
            raise Broken(f"{name}: {wrong}")
        return
    if mask is None:
        if not theirs.all_valid:
            raise Broken(f"{name}: a plain tensor, where {int((~theirs.mask).sum())} elements are invalid")
        mask = theirs.mask
    wrong = mask_difference(mask, theirs.mask)
    if not wrong and trial.sample.valueless:
        wrong = None if data.dtype is theirs.data.dtype else f"dtype {data.dtype} instead of {theirs.data.dtype}"
    elif not wrong:
        wrong = difference(data, theirs.data, mask, magnitude=trial.magnitude, coarsest=trial.rounding)
        if wrong and (
            equally_right(trial.sample, position, data, theirs.data, mask)
            or explained_by_rounding(trial, position, data, theirs.data, mask)
        ):
            wrong = None
    if wrong:
        raise Broken(f"{name}: {wrong}{likely_cause(trial, position, data, theirs)}")


# ----------------------------------------------------------------------------------------------------------------------
# P8: closed or refused. A call with invalid elements gives masked results, or raises an error naming the operator.


def closed_or_refused(trial: Trial) -> None:
    """P8: never a silent plain result. P2 tests whether the mask is right."""
    if not trial.partial:
        raise NotAsked("nothing is invalid")
    try:
        results = trial.outcome()
    except MaskedSemanticsError as error:
        _names_the_operator(str(error), trial)
        return
    # An empty tensor has no mask to lose; torch's kernels return empty tensors for results that they don't compute.
    plain = [n for n, v in enumerate(results) if isinstance(v, tuple) and v[1] is None and v[0].numel()]
    lost = [n for n in _expected_masked(trial, plain) if _depends_on_masked_operands(trial, n)] if plain else []
    if lost:
        raise Broken(f"result {lost[0]}: a plain tensor, although an operand is masked")


def _names_the_operator(message: str, trial: Trial) -> None:
    """Broken if the error message does not name the operator."""
    if isinstance(trial.sample.fn, OpOverload):
        name = packet_name(trial.sample.fn).rpartition("::")[2]
        if name not in message:
            raise Broken(f"the refusal does not name {name}: {message[:160]}")


def _expected_masked(trial: Trial, plain: Sequence[int]) -> list[int]:
    """Which of the `plain` results should be masked, according to the rules and, if there is one, the oracle."""
    rules = [resolve(op).rule for op in _overloads(trial)]
    plain = [n for n in plain if not any(rule is not None and rule.is_plain(n) for rule in rules)]
    try:
        want = trial.expected()
    except (Refused, NoOracle):
        return list(plain)
    return [n for n in plain if n >= len(want) or isinstance(want[n], Expected)]


def _depends_on_masked_operands(trial: Trial, result: int) -> bool:
    """Whether plain torch's result changes with the masked operands. If it doesn't, it is rightly plain."""
    try:
        with_other_values = tree_leaves(trial.on_other_values(masked_only=True).plain())[result]
    except Exception:
        # Whether plain torch raises depends on these values, and so does the result.
        return True
    original = tree_leaves(trial.plain())[result]
    return bool(bit_difference(with_other_values, original)) or with_other_values.dtype is not original.dtype


def _overloads(trial: Trial) -> Sequence[OpOverload]:
    sample = trial.sample
    return [sample.fn] if isinstance(sample.fn, OpOverload) else calls_of(sample.fn, *sample.args, **sample.kwargs)


# -------------------- results that depend on the last bit of an operand, such as a softmax of large numbers in bfloat16

NUDGES = 8
# The error that we accept, relative to that of nudged operands: every step of a call rounds, not only its operands.
FURTHER = 4.0


def explained_by_rounding(trial: Trial, position: int, got: Tensor, want: Tensor, mask: Tensor) -> bool:
    """Whether `got` is as near to `want` (where `mask`) as the same result for operands with other last bits."""
    if not (want.is_floating_point() or want.is_complex()) or got.shape != want.shape or got.dtype is not want.dtype:
        return False
    spread = torch.zeros(want.shape, dtype=torch.float64)
    for seed in range(NUDGES):
        nudged = _expected_of_nudged(trial, position, seed)
        if nudged is None or not torch.equal(nudged.mask, mask):
            return False
        spread = torch.maximum(spread, _distance(nudged.data, want))
    return bool(((_distance(got, want) <= FURTHER * spread) | ~mask).all())


def _expected_of_nudged(trial: Trial, position: int, seed: int) -> Expected | None:
    try:
        found = trial.on_other_values(change=functools.partial(_nudged, seed=seed)).expected()[position]
    except (NoOracle, Refused):
        return None
    return found if isinstance(found, Expected) else None


def _nudged(tensor: Tensor, seed: int) -> Tensor:
    """Each element one rounding further up, or down, or as it is."""
    if not tensor.is_floating_point():
        return tensor.detach().clone()
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randint(-1, 2, tensor.shape, generator=generator)
    return (tensor.detach().double() * (1 + torch.finfo(tensor.dtype).eps * direction)).to(tensor.dtype)


def _distance(mine: Tensor, theirs: Tensor) -> Tensor:
    wide = torch.complex128 if theirs.is_complex() else torch.float64
    return (mine.detach().to(wide) - theirs.detach().to(wide)).abs()


# ----------------------------------------------------------------------------------------------------------------------
# Ties: among equal values, torch's unstable sorts and selections may return any index, and so may a subject.

# For each function: which result is an index, and the position of `dim` among its arguments.
FREE = {"sort": (1, 1), "argsort": (0, 1), "topk": (1, 2), "kthvalue": (1, 2), "mode": (1, 1)}


def equally_right(sample: Sample, result: int, mine: Tensor, theirs: Tensor, mask: Tensor | None = None) -> bool:
    """Whether two results (where `mask`) are indices of equal values, from a function that doesn't specify which."""
    name = getattr(sample.fn, "__name__", "")
    index_result, dim_position = FREE.get(name, (-1, -1))
    if result != index_result or sample.kwargs.get("stable") or mine.shape != theirs.shape:
        return False
    x = sample.args[0]
    dim = sample.kwargs.get("dim", sample.args[dim_position] if len(sample.args) > dim_position else -1)
    if not isinstance(dim, int) or x.ndim == 0:
        return False
    keepdim = mine.ndim == x.ndim
    at_mine, at_theirs = (
        x.gather(dim, (t if keepdim else t.unsqueeze(dim)).clamp(0, x.shape[dim] - 1)) for t in (mine, theirs)
    )
    same = (at_mine == at_theirs) | ((at_mine != at_mine) & (at_theirs != at_theirs))
    if not keepdim:
        same = same.squeeze(dim)
    return bool(torch.all(same if mask is None else same | ~mask))


# ----------------------------- what is likely wrong with a rule of a user's own: additions to the messages of P2 and P4


def likely_cause(trial: Trial, result: int, got: Tensor, want: Expected) -> str:
    """What the rule of a reduction states wrongly, by its oracle under another statement; "" if nothing is known."""
    op = trial.sample.fn
    rule = registry.get(op) if isinstance(op, OpOverload) else None
    if rule is None or rule.is_built_in or rule.category is not REDUCTION:
        return ""
    if got.dtype is torch.int64 and result not in (rule.positions or ()):
        as_positions = _expected(trial, result, by_category.Stated(positions=(result,)))
        if as_positions is not None and difference(got, as_positions.data, want.mask) is None:
            return f". It looks like a position in the slice: dims=Slices(positions=({result},))"
    identity = rule.traits.identity
    if identity is None:
        return ""
    with_one_more = _expected(trial, result, by_category.Stated(one_more=identity))
    if with_one_more is not None and difference(with_one_more.data, want.data, want.mask) is not None:
        number = "identity" if callable(identity) else f"identity={identity}"
        return (
            f". {number} is none of this operator: a slice with one such element more has another result. Write the "
            "rule with over_slices"
        )
    return ""


def own_lowerings(trial: Trial) -> str:
    """Where the lowerings are written that the rule has itself; "" if it has none."""
    op = trial.sample.fn
    rule = registry.get(op) if isinstance(op, OpOverload) else None
    if rule is None or rule.is_built_in:
        return ""
    ways = [way for run in rule.lowerings.values() for way in ways_of(run)]
    functions = [inspect.unwrap(way.run if isinstance(way, OnCall) else way) for way in ways]
    functions = [function for function in functions if hasattr(function, "__code__")]
    places = [f"{path_in_package(f.__code__.co_filename, f.__module__)}:{f.__code__.co_firstlineno}" for f in functions]
    return f" (its lowering is at {', '.join(places)})" if places else ""


def _expected(trial: Trial, result: int, stated: by_category.Stated) -> Expected | None:
    """What the oracle gives if the rule had stated this."""
    with by_category.stating(stated):
        try:
            found = tree_leaves(trial.expected())[result]
        except Exception:  # an operator that does not take it
            return None
    return found if isinstance(found, Expected) else None


LAWS = (
    Law("P1", "all valid: as plain torch", all_valid_identity, masks=WHOLE, also=error_cases),
    # (P1 covers "unstored".)
    Law("P2", "valid elements: as the oracle", compress, masks=("stored", *PARTIAL), one_hole=True),
    Law(
        "P8",
        "masked results, or a refusal that names the operator",
        closed_or_refused,
        masks=("half", "half_first", "half_others", "slices", "empty"),
    ),
)
