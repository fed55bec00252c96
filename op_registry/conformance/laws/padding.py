"""P9: a padded batch gives, at the positions that are there, what its samples give one by one; or it is refused.

From the calls of operators that samples make and the dimensions that their rules state, ragged batches are drawn
(ragged.py). Each is run once as a padded batch, with garbage in the padding, and once for each sample, unpadded. Where
the batch's result is there, in order, it has as many elements as the sample's, as valid, with its values; operands have
the samples' gradients, absent or 0 at padding, and what samples share has the sum.

Where nothing is missing, the batch is run twice: its extent is its mask, and a tensor of its own. Both runs have the
same results. The in-place and out= forms of an operator are called in its place.

Nothing is claimed for random numbers, and for results and operands that are indices, which count in the batch. Where
torch has NaN for what is made of nothing, the batch has no number.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.bound import Bound
from op_registry.conformance.compare import difference, mask_difference
from op_registry.conformance.law import Broken, Case, Law, NotAsked, Option, RefusedRightly
from op_registry.conformance.laws.gradients import masked_like_its_tensor, same_gradient
from op_registry.conformance.laws.ragged import PaddedTrial, Ragged, padded_trials
from op_registry.conformance.own_operators import written_by
from op_registry.conformance.plain_torch import first_line, one_line, weighting
from op_registry.conformance.sample import Operator, start_random_numbers, tree_leaves
from op_registry.conformance.samples import left_to_others
from op_registry.conformance.subject import Observed, Subject
from op_registry.errors import MaskedSemanticsError
from op_registry.laws.categories import POOLING

if TYPE_CHECKING:
    from op_registry.conformance.trials import Settings

# What gradients agree to, relative to the largest: a sum over samples has another order.
_GRADIENTS = {torch.float64: 1e-7, torch.complex128: 1e-7}
_NARROW_GRADIENTS = 2e-3


@dataclass
class Run:
    """One run: its results; the operands."""

    results: list[Shown]
    operands: dict[str, Any]


@dataclass(frozen=True)
class PaddedBatch:
    """A ragged batch, and how it is run.

    garbage  what is under masks and in padding
    storage  how the operands that have an extent are stored; None: densely
    form     the in-place or out= form that is called in place of the operator
    """

    subject: Subject
    ragged: Ragged
    garbage: str
    seed: int
    storage: str | None = None
    form: OpOverload | None = None

    def check(self) -> None:
        """P9 of this batch."""
        ragged, wanted = self.ragged, self._differentiable() if self.form is None else frozenset()
        try:
            # The batch first: what a refused call would do with a sample is nobody's question.
            batch = self._of_batch(wanted)
            samples = [self.of_sample(n, wanted) for n in ragged]
            errors = [sample for sample in samples if isinstance(sample, Exception)]
            if len(errors) == len(samples):
                raise NotAsked(f"a sample alone raises {one_line(errors[0])}")
            if isinstance(batch, Exception):
                if self.form is not None and self._torch_raises(self.form):
                    raise NotAsked(f"torch raises for the whole batch {one_line(batch)}")
                raise batch
            if not ragged.draw.holes:
                _same_in_both_forms(batch, self._of_batch(wanted, own=True))
            compared = _same_results(ragged, batch, samples)
            if wanted and torch.Tag.nondeterministic_seeded not in ragged.op.tags:
                self._same_gradients(batch, samples, compared, sorted(wanted))
        except MaskedSemanticsError as refusal:
            raise RefusedRightly(first_line(refusal)) from refusal
        except Broken as broken:
            raise Broken(f"{ragged}: {broken}") from None

    def samples_agree(self, mode: Subject) -> bool:
        """Whether the samples, unpadded, have the same results in another mode: torch's own graphs may differ."""
        for n in self.ragged:
            one, other = (replace(self, subject=s, form=None).of_sample(n) for s in (self.subject, mode))
            if isinstance(one, Run) and isinstance(other, Run):
                pairs = zip(one.results, other.results, strict=True)
                if any(difference(again.data, result.data, result.valid) for result, again in pairs):
                    return False
        return True

    def _torch_raises(self, form: OpOverload) -> bool:
        """Whether a form doesn't fit a batch of plain tensors: a broadcast result has no room in its first operand."""
        start_random_numbers(self.seed)
        try:
            written_by(form, self.ragged.op, self.ragged.named(self.ragged.batch(self.garbage)).named)
        except Exception:
            return True
        return False

    def _of_batch(self, wanted: frozenset[str], own: bool = False) -> Run | Exception:
        """The call on the batch. Or the exception that it raises, if it is not a refusal.

        own  whether the extent is a tensor of its own also where nothing is missing; else it is the mask there
        """
        subject, ragged = self.subject, self.ragged
        operands: dict[str, Any] = {}
        for name, data in ragged.batch(self.garbage).items():
            if name not in ragged.ragged:
                operands[name] = subject.placed(data).requires_grad_(name in wanted)
                continue
            place = ragged.ragged[name]
            mask = ragged.masks[name] if own or ragged.draw.holes else None
            value = subject.padded(data, mask, ragged.where_there(data.ndim, *place), *place, name in wanted)
            operands[name] = value if self.storage is None else subject.stored(value, self.storage, name in wanted)
        try:
            return self._run(ragged.named(operands), operands)
        except MaskedSemanticsError:
            raise
        except Exception as error:
            return error

    def of_sample(self, n: int, wanted: frozenset[str] = frozenset()) -> Run | Exception:
        """The call on one sample by itself: plain, or masked where it misses values. Or the exception it raises."""
        subject, ragged = self.subject, self.ragged
        operands: dict[str, Any] = {}
        for name, data in ragged.batch(self.garbage).items():
            own = ragged.cut(name, data, n).clone()
            if name in ragged.ragged and ragged.draw.holes:
                operands[name] = subject.wrap(own, ragged.cut(name, ragged.masks[name], n), name in wanted)
            else:
                operands[name] = subject.placed(own).requires_grad_(name in wanted)
        try:
            return self._run(ragged.named(operands, n), operands)
        except Exception as error:
            return error

    def _run(self, call: Bound, operands: dict[str, Any]) -> Run:
        subject, op = self.subject, self.ragged.op
        start_random_numbers(self.seed)
        if self.form is None:
            result = call.applied(lambda *args, **kwargs: subject.call(op, *args, **kwargs))
        else:
            result = written_by(self.form, op, call.named)
        leaves = [leaf for leaf in tree_leaves(result, is_leaf=subject.is_value) if subject.is_value(leaf)]
        return Run([Shown.of(subject, leaf) for leaf in leaves], operands)

    def _differentiable(self) -> frozenset[str]:
        """The operands to differentiate with respect to: all of floating-point numbers, or the first; as torch can."""
        given = self.ragged.given
        # (The weights of classes have no derivative, though torch does not always say so.)
        floating = [
            n
            for n, t in given.items()
            if (t.is_floating_point() or t.is_complex()) and not (n == "weight" and "target" in given)
        ]
        for names in (floating, floating[:1]):
            operands = {n: t.clone().requires_grad_(n in names) for n, t in given.items()}
            start_random_numbers(self.seed)
            try:
                result = tree_leaves(self.ragged.named(operands).applied(self.ragged.op))
                parts = [r.sum().abs() for r in result if isinstance(r, Tensor) and r.requires_grad]
                if parts:
                    torch.autograd.grad(sum(parts[1:], parts[0]), [operands[n] for n in names], allow_unused=True)
                    return frozenset(names)
            except Exception:
                continue
        return frozenset()

    def _same_gradients(
        self, batch: Run, samples: Sequence[Run | Exception], compared: Compared, names: Sequence[str]
    ) -> None:
        """Gradients of a weighted sum of what was compared."""
        ragged = self.ragged
        want = {name: torch.zeros_like(ragged.given[name]) for name in names}
        for n, sample in enumerate(samples):
            if isinstance(sample, Run):
                own = [(r, n, x.data, compared[r, n][1]) for r, x in enumerate(sample.results) if (r, n) in compared]
                for name, gradient in self._gradients(own, sample.operands, names).items():
                    if gradient is not None:
                        data, mask = gradient
                        part = data.detach() if mask is None else torch.where(mask, data.detach(), 0)
                        ragged.cut(name, want[name], n).add_(part)
        parts = [(r, n, ragged.of_sample(r, batch.results[r].data, n), at) for (r, n), (at, _) in compared.items()]
        got = self._gradients(parts, batch.operands, names)
        for name in names:
            _same_gradient(f"the gradient of {name}", got.get(name), want[name], ragged.masks.get(name))

    def _gradients(
        self, parts: Sequence[tuple[int, int, Tensor, Tensor]], operands: Mapping[str, Any], names: Sequence[str]
    ) -> dict[str, Observed | None]:
        """The gradients of a weighted sum of elements: those at the places of parts, by result and sample."""
        found = []
        for result, n, data, places in parts:
            if data.requires_grad and len(places):
                taken = data.reshape(-1)[places]
                part = (taken * weighting(taken, 7 * result + n)).sum()
                found.append(part.real if part.is_complex() else part)
        if not found:
            return {}
        gradients = self.subject.gradients(sum(found[1:], found[0]), [operands[n] for n in names])
        return {n: None if g is None else self.subject.observe(g) for n, g in zip(names, gradients, strict=True)}


# What is compared of each result and sample: the places in the batch's part, and in the sample's result.
Compared = dict[tuple[int, int], tuple[Tensor, Tensor]]


def _same_in_both_forms(batch: Run, other: Run | Exception) -> None:
    """Compare with the run in which the extent is a tensor of its own."""
    if isinstance(other, Exception):
        raise Broken(f"with an extent of its own, it raises {one_line(other)}")
    for result, (one, again) in enumerate(zip(batch.results, other.results, strict=True)):
        wrong = again.difference(one)
        if wrong:
            raise Broken(f"result {result}, with an extent of its own: {wrong}")


def _same_results(ragged: Ragged, batch: Run, samples: Sequence[Run | Exception]) -> Compared:
    compared: Compared = {}
    for result, shown in enumerate(batch.results):
        there = shown.there if shown.masked else ragged.plainly_there(result, shown.data)  # what would be there
        mask = shown.valid if shown.masked else there
        if bool((mask & ~there).any()):
            raise Broken(f"result {result}: {int((mask & ~there).sum())} elements are valid where nothing is there")
        for n, sample in enumerate(samples):
            data, valid, places = (ragged.of_sample(result, t, n) for t in (shown.data, mask, there))
            name = f"result {result} of sample {n}"
            if isinstance(sample, Run) and result < len(sample.results):
                at = places.nonzero()[:, 0]
                chosen = _same_result(ragged, n, result, name, data[at], valid[at], sample.results[result])
                compared[result, n] = at[chosen], chosen
            elif bool(valid.any()) and (isinstance(sample, Run) or _has_no_result(ragged, n)):
                # (A longer sample is split into more parts.)
                why = "it has no such result" if isinstance(sample, Run) else f"it raises {one_line(sample)}"
                raise Broken(f"{name}: {int(valid.sum())} valid elements, and alone {why}")
    return compared


def _has_no_result(ragged: Ragged, n: int) -> bool:
    """Whether a sample that raises by itself has nothing valid in the batch: it is too short."""
    role = ragged.axes.role
    if role == "window":  # (torch refuses to pool some samples that do have a window)
        return ragged.rule.category is not POOLING
    return role in ("reduced", "contracted") and ragged.lengths[n] == 0


def _same_result(ragged: Ragged, n: int, result: int, name: str, got: Tensor, valid: Tensor, expected: Shown) -> Tensor:
    """Which elements of a sample's result were compared with `got`, the elements that are there in the batch."""
    want, wanted = expected.data.reshape(-1), expected.valid.reshape(-1)
    nothing = torch.zeros_like(wanted)
    if ragged.lengths[n] == 0:
        nothing = made_of_nothing(got, valid, want, wanted) if len(got) == len(want) else nothing
        if ragged.rule.name in ("layer_norm", "native_group_norm"):  # torch gives 0 for the mean that is none
            nothing = nothing | (wanted & (want == 0) & ~valid) if len(got) == len(want) else nothing
    claimed = not _is_unclaimed(ragged, result, expected.data) and not _is_normalised_alone(ragged, n, want)
    wrong = elements_difference(got, valid, want, wanted, nothing, claimed)
    if wrong:
        raise Broken(f"{name}: {wrong}")
    return (wanted & ~nothing).nonzero()[:, 0]


def _is_normalised_alone(ragged: Ragged, n: int, values: Tensor) -> bool:
    """Whether torch divides one number's distance from its own mean, a rounding error, by the root of eps."""
    alone = ragged.rule.name.endswith("batch_norm") and ragged.lengths[n] == 1
    return alone and values.dtype is not torch.float64


def _is_unclaimed(ragged: Ragged, number: int, result: Tensor) -> bool:
    """Whether values are random, or indices that count in the batch."""
    if torch.Tag.nondeterministic_seeded in ragged.op.tags:
        return True
    first, name = next(iter(ragged.given.values())), ragged.op._schema.name
    made = result.dtype is torch.int64 and first.dtype is not torch.int64 and not name.endswith(_COUNTS)
    stated = None if ragged.rule.is_built_in else ragged.rule.positions
    indices = made or name.endswith(_INDICES) if stated is None else number in stated
    return indices and (ragged.draw.side != "right" or ragged.axes.role == "window")


_COUNTS = ("count_nonzero", "sum", "prod")
_INDICES = ("argmax", "argmin")  # in a dtype that the caller names, too


def _same_gradient(name: str, got: Observed | None, want: Tensor, mask: Tensor | None) -> None:
    masked_like_its_tensor(name, got, mask)
    # (Any number will do where the sample's is NaN, and an infinity where it is another: 0/0 and 1/0 of short samples.)
    if got is not None:
        want = torch.where(want.isinf() & ~got[0].isfinite(), torch.nan, want)
    same_gradient(name, got, (want, None), mask, _GRADIENTS.get(want.dtype, _NARROW_GRADIENTS))


# ------------------------------------------------------- what a value of a padded batch shows (of random programs, too)


@dataclass(frozen=True)
class Shown:
    """A value: its data; bool of their shape: which elements are valid, and which are there; whether it is masked."""

    data: Tensor
    valid: Tensor
    there: Tensor
    masked: bool

    @staticmethod
    def of(subject: Subject, value: Any) -> Shown:
        """A value of the subject, or a plain tensor."""
        own = subject.is_value(value)
        data, mask = subject.observe(value) if own else (value, None)
        extent = subject.extent(value) if own else None
        everywhere = torch.ones(data.shape, dtype=torch.bool)
        valid, there = (everywhere if known is None else known.expand(data.shape) for known in (mask, extent))
        return Shown(data, valid, there, mask is not None or extent is not None)

    def difference(self, other: Shown) -> str | None:
        """How it differs from another run of the same batch, or None."""
        if self.data.shape != other.data.shape:
            return f"the shape {tuple(self.data.shape)} instead of {tuple(other.data.shape)}"
        if not torch.equal(self.there, other.there):
            return f"{int((self.there != other.there).sum())} positions are there in one of both"
        wrong = mask_difference(self.valid, other.valid)
        return wrong or difference(self.data.detach(), other.data.detach(), other.valid)


def made_of_nothing(got: Tensor, valid: Tensor, want: Tensor, wanted: Tensor) -> Tensor:
    """Where a sample has NaN for what is made of nothing, and the batch no number."""
    return wanted & want.isnan() & (~valid | got.isnan())


def elements_difference(
    got: Tensor, valid: Tensor, want: Tensor, wanted: Tensor, nothing: Tensor, claimed: bool = True
) -> str | None:
    """How the elements of a sample that are there in a batch differ from those of the sample alone, or None.

    nothing  elements of which nothing is asked
    claimed  whether values are compared, beside validity
    """
    if len(got) != len(want):
        return f"{len(got)} positions are there, and {len(want)} in the sample alone"
    wrong = mask_difference(valid & ~nothing, wanted & ~nothing)
    return wrong or (difference(got.detach(), want.detach().to(got.dtype), wanted & ~nothing) if claimed else None)


# ------------------------------------------------------------------------------------------- the cases of an operator


def cases(operator: Operator, subject: Subject, settings: Settings) -> Iterator[Case]:
    """Each rule that the operator's samples call: densely, and as the subject can, stored and in modes."""
    everywhere = settings.most is None and settings.dense
    stored = subject.padded_storages if everywhere else settings.also_stored
    dense: list[Option | None] = [None] if settings.dense else []
    ways = [*dense, *(("--storage", s) for s in stored if s in subject.padded_storages)]
    in_graphs = settings.modes if everywhere or not settings.dense else ()
    modes: list[Option | None] = [("--mode", m) for m in in_graphs if m in subject.padded_modes]
    left_out = left_to_others(operator, settings.each_overload_once, 3)
    compiled: set[OpOverload] = set()
    for trial in padded_trials(operator, settings.seed, settings.most, settings.sample, left_out):
        # One ragged batch of each rule is asked in other modes.
        in_modes = modes if trial.ragged is not None and trial.op not in compiled and trial.form is None else []
        compiled |= {trial.op} if in_modes else set()
        # (What a form writes is its rule's result: densely is enough.)
        for option in [*(ways if trial.form is None else dense), *in_modes]:
            yield Case(
                f"{trial} {option[1]}" if option else str(trial),
                functools.partial(_run, trial, subject, settings.seed, option),
                option,
                f" --sample {trial.number} --seed {settings.seed}",
                asked_of=str(trial.asked),
            )


def _run(trial: PaddedTrial, subject: Subject, seed: int, option: Option | None) -> None:
    """The law, on dense storage or as an option says: ("--storage", "coo"), ("--mode", "aot_eager")."""
    if trial.ragged is None:
        raise NotAsked(trial.why)
    kind, name = option or ("", "")
    mode = subject.modes()[name] if kind == "--mode" else None
    storage = name if kind == "--storage" else None
    batch = PaddedBatch(mode or subject, trial.ragged, trial.garbage, seed, storage, trial.form)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            batch.check()
        except Broken:
            if mode is not None and not replace(batch, subject=subject).samples_agree(mode):
                raise NotAsked(f"a sample alone has another result in {name}, too") from None
            raise


def _nothing_called(operator: Operator, seed: int, silences: Mapping[str, int] | None) -> str | None:
    if silences is None:
        return None
    return next(iter(silences), "its samples call no rule that other operators' samples do not call")


LAWS = (Law("P9", "a padded batch is its samples", cases=cases, exempt=_nothing_called, of_rules=True),)
