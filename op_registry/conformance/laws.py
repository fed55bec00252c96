"""The laws P1, P2, P3 as checks on one sample under one set of masks. Gradients are in gradients.py, modes in modes.py.

A law is a function of a :class:`Trial`. It returns when it holds, and raises :class:`Broken` with what was wrong,
:class:`NotAsked` where the law has nothing to say, or what the subject raised.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.compare import ROUNDING, bit_difference, difference, mask_difference
from op_registry.conformance.masks import FILLS, PLAIN, Masking, refilled
from op_registry.conformance.oracles import NoOracle, Refused, Slot, expected
from op_registry.conformance.randomness import start_random_numbers
from op_registry.conformance.samples import Sample
from op_registry.conformance.subject import Subject
from op_registry.conformance.ties import equally_right
from op_registry.conformance.trees import tree_leaves
from op_registry.errors import MaskedSemanticsError

# Floating point with fewer digits than sums and products of what the samples hold need.
NARROW = (torch.float16, torch.bfloat16)


class Broken(AssertionError):
    """The law does not hold; the message says how."""


class NotAsked(Exception):
    """The law has nothing to say about this trial; the message says why."""


class Densified(Exception):
    """The law holds, but something had to be stored densely for it; the message says what."""


class Refusal(Exception):
    """The subject refused a call for which there is an answer."""


@dataclass(frozen=True)
class Trial:
    """One sample under one set of masks, given to one subject."""

    subject: Subject
    sample: Sample
    masking: Masking
    seed: int = 0

    @functools.cached_property
    def masks(self) -> list[Tensor | None]:
        """The full mask of each tensor of the sample; None for one that stays plain."""
        return self.masking.full(self.sample.tensors)

    @functools.cached_property
    def partial(self) -> bool:
        """Whether anything is invalid."""
        return any(mask is not None and not bool(mask.all()) for mask in self.masks)

    def wrapped(
        self, fill: str | None = None, gradients: bool = False, storage: str | None = None, roomy: bool = False
    ) -> tuple[Any, Any, list[Any]]:
        """Arguments for the subject, and the value that each tensor became.

        Hidden data is overwritten by `fill`; masked tensors are stored as `storage` says, where that fits: "csr" all of
        them, "csr_first" only the first. `roomy` stores invalid elements beside the valid ones.
        """
        values: list[Any] = []
        layout, _, which = storage.partition("_") if storage is not None else ("", "", "")
        done = False
        found = dict(zip(map(id, self.sample.tensors), zip(self.masking.masks, self.masks, strict=True), strict=True))

        def wrap(tensor: Tensor) -> Any:
            nonlocal done
            mask, full = found[id(tensor)]
            data = refilled(tensor, full, fill) if fill else tensor.detach().clone()
            wanted = gradients and self.may_have_gradient(len(values))
            if mask is PLAIN:
                value: Any = data.requires_grad_(wanted)
            else:
                value = self.subject.wrap(data, mask, wanted)
                if layout and not (done and which == "first"):
                    dense, value = value, self.subject.stored(value, layout, wanted, roomy)
                    done = done or value is not dense
            values.append(value)
            return value

        args, kwargs = self.sample.with_tensors(wrap)
        return args, kwargs, values

    def plain(self) -> Any:
        """What plain torch gives."""
        written = self.written
        args, kwargs, copies = self.copies()
        start_random_numbers(self.seed)
        result = self.sample.fn(*args, **kwargs)
        return result, [copies[n] for n in written]

    def outcome(self, fill: str | None = None) -> list[Any]:
        """What the subject gives: for each result and each argument written to (data, mask or None), or a value."""
        args, kwargs, values = self.wrapped(fill)
        result = self.run(args, kwargs)
        return observed(self.subject, [result, [values[n] for n in self.written]])

    def may_have_gradient(self, position: int) -> bool:
        """Whether a tensor of the sample is one to differentiate by: numbers, which the call does not overwrite."""
        tensor = self.sample.tensors[position]
        if self.sample.variables is not None and position not in self.sample.variables:
            return False
        return (tensor.is_floating_point() or tensor.is_complex()) and position not in self.written

    def copies(self, gradients: bool = False) -> tuple[Any, Any, list[Tensor]]:
        """Plain copies of the arguments, and of each tensor among them."""
        made: list[Tensor] = []

        def copy(tensor: Tensor) -> Tensor:
            wanted = gradients and self.may_have_gradient(len(made))
            made.append(tensor.detach().clone().requires_grad_(wanted))
            return made[-1]

        args, kwargs = self.sample.with_tensors(copy)
        return args, kwargs, made

    @functools.cached_property
    def magnitude(self) -> float:
        """Of what the call computes with, where its dtype holds so few digits that sums of it lose all of their own."""
        found = [
            t.abs()[t.isfinite()].max() for t in self.sample.tensors if t.dtype in NARROW and bool(t.isfinite().any())
        ]
        return max([1.0, *map(float, found)])

    @functools.cached_property
    def rounding(self) -> float:
        """Of the coarsest of the arguments: what torch computes from it alone is no finer."""
        return max((ROUNDING.get(t.dtype, 0.0) for t in self.sample.tensors), default=0.0)

    @functools.cached_property
    def written(self) -> list[int]:
        """Which tensors of the sample plain torch writes to, and does not give back."""
        args, kwargs, copies = self.copies()
        versions = [t._version for t in copies]
        start_random_numbers(self.seed)
        try:
            given = {id(leaf) for leaf in tree_leaves(self.sample.fn(*args, **kwargs))}
        except Exception:
            return []
        return [
            n for n, (t, v) in enumerate(zip(copies, versions, strict=True)) if t._version != v and id(t) not in given
        ]

    def run(self, args: Any, kwargs: Any) -> Any:
        """The subject's own result, random numbers as they were in every other run."""
        start_random_numbers(self.seed)
        return self.subject.call(self.sample.fn, *args, **kwargs)

    def expected(self) -> list[Any]:
        """What the oracles say: Slots, plain tensors and Python values."""
        args, kwargs, copies = self.copies()
        masks = {id(t): m for t, m in zip(copies, self.masks, strict=True) if m is not None}
        also = [copies[n] for n in self.written]
        start_random_numbers(self.seed)
        return tree_leaves(expected(self.sample.fn, args, kwargs, masks, also))


def observed(subject: Subject, result: Any) -> list[Any]:
    """Each leaf of a result as (data, mask or None), or as the Python value that it is."""
    leaves = tree_leaves(result, is_leaf=subject.is_value)
    return [subject.observe(leaf) if subject.is_value(leaf) else leaf for leaf in leaves]


def all_valid_identity(trial: Trial) -> None:
    """P1: with every element valid, what plain torch gives: values, dtype, shape, and strides of views."""
    if trial.partial:
        raise NotAsked("something is invalid")
    try:
        want = tree_leaves(trial.plain())
    except Exception as error:
        raise NotAsked(f"plain torch raises {type(error).__name__}: {_line(error)}") from None
    got = trial.outcome()
    if len(got) != len(want):
        raise Broken(f"{len(got)} results instead of {len(want)}")
    bitwise = trial.masking.kind == "unstored"
    for position, (mine, plain) in enumerate(zip(got, want, strict=True)):
        _same_as_plain(position, mine, plain, bitwise, trial)


def _repeats_itself(trial: Trial, position: int, plain: Tensor) -> bool:
    """Whether plain torch gives these bits again, for copies elsewhere in memory.

    Some routines of LAPACK sum in an order that depends on where in memory their arguments lie.
    """
    runs = [plain]
    for _ in range(16):  # all are kept, so that each lies elsewhere
        runs.append(tree_leaves(trial.plain())[position].clone())
        if bit_difference(runs[-1], plain):
            return False
    return True


def _same_as_plain(position: int, mine: Any, plain: Any, bitwise: bool, trial: Trial) -> None:
    name = f"result {position}"
    if not isinstance(plain, Tensor):
        if mine != plain and not (mine != mine and plain != plain):
            raise Broken(f"{name}: {mine!r} instead of {plain!r}")
        return
    if not isinstance(mine, tuple):
        raise Broken(f"{name}: {mine!r} instead of a tensor")
    data, mask = mine
    if plain.layout is not torch.strided:
        raise NotAsked(f"the result is {plain.layout}")
    if mask is not None and not bool(mask.all()):
        raise Broken(
            f"{name}: invalid elements although every operand is valid: {mask_difference(mask, torch.ones_like(mask))}"
        )
    if trial.sample.valueless:
        if data.shape != plain.shape or data.dtype is not plain.dtype:
            raise Broken(f"{name}: {data.dtype} {tuple(data.shape)} instead of {plain.dtype} {tuple(plain.shape)}")
        return
    wrong = bit_difference(data, plain) if bitwise else None
    if not bitwise or (wrong and not _repeats_itself(trial, position, plain)):
        wrong = difference(data, plain, magnitude=trial.magnitude, coarsest=trial.rounding)
    if wrong and not (not bitwise and equally_right(trial.sample, position, data, plain)):
        raise Broken(f"{name}: {wrong}")
    if plain._is_view() and plain.numel():
        mine_strides, strides = ([t.stride(d) for d in range(t.ndim) if t.shape[d] > 1] for t in (data, plain))
        if mine_strides != strides:
            raise Broken(f"{name}: strides {data.stride()} instead of {plain.stride()} for shape {tuple(plain.shape)}")


def same_errors(trial: Trial) -> None:
    """P1 for calls that plain torch refuses: the same exception, with every tensor masked and valid."""
    try:
        trial.plain()
    except Exception as error:
        wanted = error
    else:
        raise NotAsked("plain torch does not refuse it on this machine")
    try:
        trial.outcome()
    except MaskedSemanticsError as error:
        raise Refusal(str(error)) from error
    except Exception as error:
        if isinstance(error, type(wanted)):
            return
        raise Broken(
            f"{type(error).__name__} ({_line(error)}) instead of {type(wanted).__name__} ({_line(wanted)})"
        ) from error
    raise Broken(f"no error, instead of {type(wanted).__name__} ({_line(wanted)})")


def compress(trial: Trial) -> None:
    """P2, P8: valid values and masks are what the oracle says; what it refuses, the subject refuses."""
    try:
        want = trial.expected()
    except Refused as reason:
        try:
            trial.outcome()
        except MaskedSemanticsError:
            return
        raise Broken(f"a result, although the semantics refuse {reason}") from None
    except NoOracle as reason:
        raise NotAsked(f"no oracle: {reason}") from None
    got = trial.outcome()
    if len(got) != len(want):
        raise Broken(f"{len(got)} results instead of {len(want)}")
    for position, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        _same_as_expected(position, mine, theirs, trial)


def _same_as_expected(position: int, mine: Any, theirs: Any, trial: Trial) -> None:
    name = f"result {position}"
    if not isinstance(theirs, (Slot, Tensor)):
        if mine != theirs and not (mine != mine and theirs != theirs):
            raise Broken(f"{name}: {mine!r} instead of {theirs!r}")
        return
    if not isinstance(mine, tuple):
        raise Broken(f"{name}: {mine!r} instead of a tensor")
    data, mask = mine
    if isinstance(theirs, Tensor):
        # A plain answer; a masked one that hides nothing says the same.
        if mask is not None and not bool(mask.all()):
            raise Broken(f"{name}: invalid elements in what is a plain answer")
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
        if wrong and equally_right(trial.sample, position, data, theirs.data, mask):
            wrong = None
    if wrong:
        raise Broken(f"{name}: {wrong}")


def non_interference(trial: Trial) -> None:
    """P3: whatever lies under the mask, results, masks, gradients and errors are the same, bit for bit."""
    if not trial.partial:
        raise NotAsked("nothing is invalid")
    base = outcome_with_gradients(trial, None)
    fills = fills_for(trial)
    for fill in fills:
        again = outcome_with_gradients(trial, fill)
        if isinstance(base, Exception) or isinstance(again, Exception):
            if type(base) is not type(again):
                raise Broken(f"with {fill} under the mask {said(again)}, otherwise {said(base)}")
            continue
        same_bits(f"with {fill} under the mask", again, base, trial)
    if isinstance(base, MaskedSemanticsError):
        raise Refusal(str(base))
    if isinstance(base, Exception):
        if plain_fails(trial):
            raise NotAsked("plain torch raises as well")
        raise base


def plain_fails(trial: Trial) -> bool:
    """Whether plain torch cannot run or differentiate the call either (twice, where that is asked)."""
    args, kwargs, tensors = trial.copies(gradients=trial.sample.differentiable)
    start_random_numbers(trial.seed)
    try:
        result = trial.sample.differentiable_part(trial.sample.fn(*args, **kwargs))
        scalar = weighted_sum([(leaf, None) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)])
        if scalar is not None:
            inputs = [t for t in tensors if t.requires_grad]
            twice = trial.sample.twice_differentiable
            first = torch.autograd.grad(scalar, inputs, allow_unused=True, create_graph=twice)
            again = weighted_sum([(g, None) for g in first if g is not None])
            if again is not None:
                torch.autograd.grad(again, inputs, allow_unused=True)
    except Exception:
        return True
    return False


def fills_for(trial: Trial) -> Sequence[str]:
    """Every fill where floating-point data is hidden, those that integers tell apart elsewhere."""
    hidden = [t for t, m in zip(trial.sample.tensors, trial.masks, strict=True) if m is not None and not bool(m.all())]
    return FILLS if any(t.is_floating_point() or t.is_complex() for t in hidden) else ("nan", "inf", "tiny")


def said(outcome: Any) -> str:
    return (
        f"it raises {type(outcome).__name__}: {_line(outcome)}"
        if isinstance(outcome, Exception)
        else "it gives a result"
    )


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:160]


def outcome_with_gradients(trial: Trial, fill: str | None, storage: str | None = None, roomy: bool = False) -> Any:
    """Results and, where there is a derivative, gradients of a fixed weighting of them; or what was raised."""
    try:
        differentiable = trial.sample.differentiable
        args, kwargs, values = trial.wrapped(fill, gradients=differentiable, storage=storage, roomy=roomy)
        outcome = observed(trial.subject, trial.run(args, kwargs))
        gradients = gradients_of(trial.subject, outcome, values) if differentiable else []
        return outcome, gradients
    except Exception as error:
        return error


def weighting(data: Tensor, seed: int = 0) -> Tensor:
    """A fixed weight for each element."""
    return _weights(data.shape, data.dtype, seed)


@functools.lru_cache(maxsize=64)
def _weights(shape: torch.Size, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 17)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, dtype=wide, generator=generator).to(dtype)


def weighted_sum(outcome: list[Any]) -> Tensor | None:
    """A scalar that every valid element of every differentiable result enters with a weight of its own."""
    parts = []
    for position, result in enumerate(outcome):
        if not isinstance(result, tuple):
            continue
        data, mask = result
        if not data.requires_grad:
            continue
        kept = data if mask is None else torch.where(mask, data, torch.zeros((), dtype=data.dtype))
        part = (kept * weighting(data, position)).sum()
        parts.append(part.real if part.is_complex() else part)
    return sum(parts[1:], parts[0]) if parts else None


def gradients_of(subject: Subject, outcome: list[Any], values: Sequence[Any], create_graph: bool = False) -> list[Any]:
    """The gradient of the weighted results for each value that may have one, observed; None elsewhere."""
    scalar = weighted_sum(outcome)
    if scalar is None:
        return []
    wanted = [v for v in values if subject.requires_grad(v)]
    found = iter(subject.gradients(scalar, wanted, create_graph))
    gradients = [next(found) if subject.requires_grad(v) else None for v in values]
    return [None if g is None else subject.observe(g) for g in gradients]


def same_bits(name: str, again: Any, base: Any, trial: Trial) -> None:
    for what, mine, theirs in (("result", again[0], base[0]), ("gradient", again[1], base[1])):
        if len(mine) != len(theirs):
            raise Broken(f"{name}: {len(mine)} {what}s instead of {len(theirs)}")
        for position, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if not isinstance(a, tuple) or not isinstance(b, tuple):
                if a is not b and a != b and not (a != a and b != b):
                    raise Broken(f"{name}: {what} {position} is {a!r} instead of {b!r}")
                continue
            if (a[1] is None) != (b[1] is None):
                raise Broken(f"{name}: {what} {position} is masked in one of two runs")
            wrong = mask_difference(a[1], b[1]) if a[1] is not None else None
            if not wrong and not (trial.sample.valueless and what == "result"):
                wrong = bit_difference(a[0], b[0], a[1])
            if wrong:
                raise Broken(f"{name}: {what} {position}: {wrong}")


Law = Callable[[Trial], None]
