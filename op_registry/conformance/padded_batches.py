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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.bound import Bound
from op_registry.conformance.compare import difference, mask_difference
from op_registry.conformance.gradients import masked_like_its_tensor, same_gradient
from op_registry.conformance.plain_torch import one_line, weighting
from op_registry.conformance.ragged import Ragged
from op_registry.conformance.randomness import start_random_numbers
from op_registry.conformance.subject import Observed, Subject
from op_registry.conformance.trees import tree_leaves
from op_registry.conformance.trial import Broken, NotAsked, RefusedRightly
from op_registry.conformance.variant_calls import written_by
from op_registry.errors import MaskedSemanticsError
from op_registry.laws.categories import POOLING

# What gradients agree to, relative to the largest: a sum over samples has another order.
_GRADIENTS = {torch.float64: 1e-7, torch.complex128: 1e-7}
_NARROW_GRADIENTS = 2e-3


@dataclass
class Run:
    """One run: the tensors of its results, observed; which of their positions are there (None: all); the operands."""

    results: list[Observed]
    there: list[Tensor | None]
    operands: dict[str, Any]


def batch_is_its_samples(
    subject: Subject,
    ragged: Ragged,
    garbage: str,
    seed: int,
    storage: str | None = None,
    form: OpOverload | None = None,
) -> None:
    """P9 of one ragged batch.

    storage  how the operands that have an extent are stored; None: densely
    form     the in-place or out= form that is called in place of the operator
    """
    wanted = _differentiable(ragged, seed) if form is None else frozenset()
    try:
        # The batch first: what a refused call would do with a sample is nobody's question.
        batch = _of_batch(subject, ragged, garbage, wanted, seed, storage, form)
        samples = [_of_sample(subject, ragged, n, garbage, wanted, seed, form) for n in ragged]
        errors = [sample for sample in samples if isinstance(sample, Exception)]
        if len(errors) == len(samples):
            raise NotAsked(f"a sample alone raises {one_line(errors[0])}")
        if isinstance(batch, Exception):
            if form is not None and _torch_raises(ragged, garbage, seed, form):
                raise NotAsked(f"torch raises for the whole batch {one_line(batch)}")
            raise batch
        if not ragged.draw.holes:
            _same_in_both_forms(batch, _of_batch(subject, ragged, garbage, wanted, seed, storage, form, own=True))
        compared = _same_results(ragged, batch, samples)
        _same_gradients(subject, ragged, batch, samples, compared, wanted)
    except MaskedSemanticsError as refusal:
        raise RefusedRightly((str(refusal).strip().splitlines() or [""])[0][:300]) from refusal
    except Broken as broken:
        raise Broken(f"{ragged}: {broken}") from None


def samples_agree(subject: Subject, mode: Subject, ragged: Ragged, garbage: str, seed: int) -> bool:
    """Whether the samples, unpadded, have the same results in another mode: torch's own graphs may differ."""
    for n in ragged:
        one, other = (_of_sample(s, ragged, n, garbage, frozenset(), seed, None) for s in (subject, mode))
        if isinstance(one, Exception) or isinstance(other, Exception):
            continue
        for (data, mask), (again, _) in zip(one.results, other.results, strict=True):
            where = torch.ones(data.shape, dtype=torch.bool) if mask is None else mask
            if difference(again, data, where):
                return False
    return True


def _torch_raises(ragged: Ragged, garbage: str, seed: int, form: OpOverload) -> bool:
    """Whether a form doesn't fit a batch of plain tensors: a broadcast result has no room in its first operand."""
    start_random_numbers(seed)
    try:
        written_by(form, ragged.op, ragged.named(ragged.batch(garbage)).named)
    except Exception:
        return True
    return False


def _operands_of_batch(
    subject: Subject, ragged: Ragged, garbage: str, wanted: frozenset[str], storage: str | None, own: bool
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, data in ragged.batch(garbage).items():
        gradient = name in wanted
        if name not in ragged.ragged:
            values[name] = subject.placed(data).requires_grad_(gradient)
            continue
        place = ragged.ragged[name]
        mask = ragged.masks[name] if own or ragged.draw.holes else None
        values[name] = subject.padded(data, mask, ragged.where_there(data.ndim, *place), *place, gradient)
        if storage is not None:
            values[name] = subject.stored(values[name], storage, gradient)
    return values


def _of_batch(
    subject: Subject,
    ragged: Ragged,
    garbage: str,
    wanted: frozenset[str],
    seed: int,
    storage: str | None,
    form: OpOverload | None,
    own: bool = False,
) -> Run | Exception:
    """The call on the batch. Or the exception that it raises, if it is not a refusal.

    own  whether the extent is a tensor of its own also where nothing is missing; else it is the mask there
    """
    operands = _operands_of_batch(subject, ragged, garbage, wanted, storage, own)
    try:
        return _run(subject, ragged, ragged.named(operands), operands, seed, form)
    except MaskedSemanticsError:
        raise
    except Exception as error:
        return error


def _of_sample(
    subject: Subject,
    ragged: Ragged,
    n: int,
    garbage: str,
    wanted: frozenset[str],
    seed: int,
    form: OpOverload | None,
) -> Run | Exception:
    """The call on one sample by itself: plain, or masked where it misses values. Or the exception that it raises."""
    operands: dict[str, Any] = {}
    for name, data in ragged.batch(garbage).items():
        own = ragged.cut(name, data, n).clone()
        if name in ragged.ragged and ragged.draw.holes:
            operands[name] = subject.wrap(own, ragged.cut(name, ragged.masks[name], n), name in wanted)
        else:
            operands[name] = subject.placed(own).requires_grad_(name in wanted)
    try:
        return _run(subject, ragged, ragged.named(operands, n), operands, seed, form)
    except Exception as error:
        return error


def _run(
    subject: Subject, ragged: Ragged, call: Bound, operands: dict[str, Any], seed: int, form: OpOverload | None
) -> Run:
    start_random_numbers(seed)
    if form is None:
        result = call.applied(lambda *args, **kwargs: subject.call(ragged.op, *args, **kwargs))
    else:
        result = written_by(form, ragged.op, call.named)
    leaves = [leaf for leaf in tree_leaves(result, is_leaf=subject.is_value) if subject.is_value(leaf)]
    return Run([subject.observe(leaf) for leaf in leaves], [subject.extent(leaf) for leaf in leaves], operands)


def _differentiable(ragged: Ragged, seed: int) -> frozenset[str]:
    """The operands to differentiate with respect to: all of floating-point numbers, or the first; as torch can."""
    # (The weights of classes have no derivative, though torch does not always say so.)
    floating = [
        n
        for n, t in ragged.given.items()
        if (t.is_floating_point() or t.is_complex()) and not (n == "weight" and "target" in ragged.given)
    ]
    for names in (floating, floating[:1]):
        operands = {n: t.clone().requires_grad_(n in names) for n, t in ragged.given.items()}
        start_random_numbers(seed)
        try:
            result = tree_leaves(ragged.named(operands).applied(ragged.op))
            parts = [r.sum().abs() for r in result if isinstance(r, Tensor) and r.requires_grad]
            if parts:
                torch.autograd.grad(sum(parts[1:], parts[0]), [operands[n] for n in names], allow_unused=True)
                return frozenset(names)
        except Exception:
            continue
    return frozenset()


# -------------------------------------------------------------------------------------------------------------- results

# What is compared of each result and sample: the places in the batch's part, and in the sample's result.
Compared = dict[tuple[int, int], tuple[Tensor, Tensor]]


def _same_in_both_forms(batch: Run, other: Run | Exception) -> None:
    """Compare with the run in which the extent is a tensor of its own."""
    if isinstance(other, Exception):
        raise Broken(f"with an extent of its own, it raises {one_line(other)}")
    pairs = zip(batch.results, batch.there, other.results, other.there, strict=True)
    for result, ((data, mask), there, (again, other_mask), other_there) in enumerate(pairs):
        everywhere = torch.ones(data.shape, dtype=torch.bool)
        masks, extents = (
            [everywhere if known is None else known.expand(data.shape) for known in both]
            for both in ((other_mask, mask), (other_there, there))
        )
        wrong = mask_difference(*masks) or difference(again.detach(), data.detach(), masks[0])
        if not torch.equal(*extents):
            wrong = f"{int((extents[0] != extents[1]).sum())} positions are there in one of both"
        if wrong:
            raise Broken(f"result {result}, with an extent of its own: {wrong}")


def _same_results(ragged: Ragged, batch: Run, samples: Sequence[Run | Exception]) -> Compared:
    compared: Compared = {}
    for result, ((data, mask), there) in enumerate(zip(batch.results, batch.there, strict=True)):
        if there is None:  # of a plain result, what would be there
            there = ragged.plainly_there(result, data) if mask is None else torch.ones(data.shape, dtype=torch.bool)
        mask = there if mask is None else mask
        if bool((mask & ~there).any()):
            raise Broken(f"result {result}: {int((mask & ~there).sum())} elements are valid where nothing is there")
        for n, sample in enumerate(samples):
            parts = [ragged.of_sample(result, t, n) for t in (data, mask, there)]
            name = f"result {result} of sample {n}"
            if isinstance(sample, Exception):
                if _has_no_result(ragged, n) and bool(parts[1].any()):
                    raise Broken(
                        f"{name}: {int(parts[1].sum())} valid elements, and alone it raises {one_line(sample)}"
                    )
                continue
            if result >= len(sample.results):  # a longer sample is split into more parts
                if bool(parts[1].any()):
                    raise Broken(f"{name}: {int(parts[1].sum())} valid elements, and alone it has no such result")
                continue
            places = _same_result(ragged, n, result, name, parts, sample.results[result])
            if places is not None:
                compared[result, n] = places
    return compared


def _has_no_result(ragged: Ragged, n: int) -> bool:
    """Whether a sample that raises by itself has nothing valid in the batch: it is too short."""
    role = ragged.axes.role
    if role == "window":  # (torch refuses to pool some samples that do have a window)
        return ragged.rule.category is not POOLING
    return role in ("reduced", "contracted") and ragged.lengths[n] == 0


def _same_result(
    ragged: Ragged, n: int, result: int, name: str, parts: Sequence[Tensor], expected: Observed
) -> tuple[Tensor, Tensor] | None:
    data, mask, there = parts
    want, want_mask = expected[0].reshape(-1), expected[1]
    want_mask = torch.ones_like(want, dtype=torch.bool) if want_mask is None else want_mask.reshape(-1)
    places = there.nonzero()[:, 0]
    if len(places) != len(want):
        raise Broken(f"{name}: {len(places)} positions are there, and {len(want)} in the sample alone")
    got, valid = data[places], mask[places]
    nothing = want_mask & want.isnan() & (~valid | got.isnan())  # torch has no number for what is made of nothing
    if ragged.lengths[n] == 0:
        if ragged.rule.name in ("layer_norm", "native_group_norm"):  # torch gives 0 for the mean that is none
            nothing = want_mask & (want == 0) & ~valid | nothing
        want_mask, valid = want_mask & ~nothing, valid & ~nothing
    wrong = mask_difference(valid, want_mask)
    if not wrong and not _is_unclaimed(ragged, result, expected[0]) and not _is_normalised_alone(ragged, n, want):
        wrong = difference(got, want.to(got.dtype) if want.dtype is not got.dtype else want, want_mask)
    if wrong:
        raise Broken(f"{name}: {wrong}")
    chosen = want_mask.nonzero()[:, 0]
    return places[chosen], chosen


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


# ------------------------------------------------------------------------------------------------------------ gradients


def _same_gradients(
    subject: Subject,
    ragged: Ragged,
    batch: Run,
    samples: Sequence[Run | Exception],
    compared: Compared,
    wanted: frozenset[str],
) -> None:
    """Gradients of a weighted sum of what was compared."""
    if not wanted or torch.Tag.nondeterministic_seeded in ragged.op.tags:
        return
    names = sorted(wanted)
    of_samples: dict[int, dict[str, Any]] = {}
    for n, sample in enumerate(samples):
        if isinstance(sample, Exception):
            continue
        scalar = _scalar(
            [
                (r, n, data.reshape(-1), compared[r, n][1])
                for r, (data, _) in enumerate(sample.results)
                if (r, n) in compared
            ]
        )
        found = _gradients(subject, scalar, sample.operands, names)
        of_samples[n] = dict.fromkeys(names) if found is None else found
    scalar = _scalar(
        [(r, n, ragged.of_sample(r, batch.results[r][0], n), places) for (r, n), (places, _) in compared.items()]
    )
    got = _gradients(subject, scalar, batch.operands, names)
    for name in names:
        _same_gradient(ragged, name, None if got is None else got[name], {n: g[name] for n, g in of_samples.items()})


def _scalar(parts: Sequence[tuple[int, int, Tensor, Tensor]]) -> Tensor | None:
    found = []
    for result, n, data, places in parts:
        if data.requires_grad and len(places):
            taken = data[places]
            part = (taken * weighting(taken, 7 * result + n)).sum()
            found.append(part.real if part.is_complex() else part)
    return sum(found[1:], found[0]) if found else None


def _gradients(
    subject: Subject, scalar: Tensor | None, operands: Mapping[str, Any], names: Sequence[str]
) -> dict[str, Observed | None] | None:
    if scalar is None:
        return None
    found = subject.gradients(scalar, [operands[n] for n in names])
    return {n: None if g is None else subject.observe(g) for n, g in zip(names, found, strict=True)}


def _same_gradient(ragged: Ragged, name: str, got: Observed | None, of_samples: Mapping[int, Observed | None]) -> None:
    tensor = ragged.given[name]
    want = torch.zeros_like(tensor)
    for n, gradient in of_samples.items():
        if gradient is not None:
            data, mask = gradient
            part = data.detach() if mask is None else torch.where(mask, data.detach(), 0)
            ragged.cut(name, want, n).add_(part)
    mask = ragged.masks.get(name)
    masked_like_its_tensor(f"the gradient of {name}", got, mask)
    # (Any number will do where the sample's is NaN, and an infinity where it is another: 0/0 and 1/0 of short samples.)
    if got is not None:
        want = torch.where(want.isinf() & ~got[0].isfinite(), torch.nan, want)
    same_gradient(f"the gradient of {name}", got, (want, None), mask, _GRADIENTS.get(want.dtype, _NARROW_GRADIENTS))
