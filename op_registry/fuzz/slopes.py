"""P5 for random programs: we compare their gradients with slopes measured by finite differences.

We move the sources that require grad a little to either side, along a random direction that also moves hidden elements.
The slope is the change of the weighted sum of the valid values. Values without a slope (they jump, have a kink, or are
not finite) are left out before we take the gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from op_registry.conformance.compare import mask_difference
from op_registry.conformance.plain_torch import one_line, weighted_sum, weighting
from op_registry.conformance.subject import Observed, Subject
from op_registry.fuzz import sources
from op_registry.fuzz.programs import Program, Source
from op_registry.fuzz.running import Outcome, gradients_of, run

STEP = 1e-6
# If the slopes on the two sides differ by more than this share of their size, there is a kink or a large curvature.
KINK = 1e-3
TOLERANCE = 1e-4
# The error of a difference, relative to the terms of the sum: their rounding errors, divided by the step.
ROUNDING = 1e-15 / STEP


def gradients_are_slopes(program: Program, subject: Subject) -> str | None:
    """P5: gradients have the masks of their tensors, and agree with the slopes measured by differences."""
    complaint = _complaint(program, subject, plain=False)
    if complaint is not None and _complaint(_all_plain(program), subject, plain=True) is not None:
        return None  # torch defines another derivative (of renorm, say), or none, or the measurement is too coarse here
    return complaint


def _complaint(program: Program, subject: Subject, plain: bool) -> str | None:
    data = {source.name: sources.data_of(source) for source in program.sources}
    directions = {s.name: _direction(s, program.seed) for s in program.sources if s.requires_grad}
    if not directions or any(each.dtype is not torch.float64 for each in directions.values()):
        return None

    def moved(step: float) -> Outcome:
        there = {name: x + step * directions[name] if name in directions else x for name, x in data.items()}
        values = sources.wrapped(program.sources, subject, None, data=there)
        return run(program, values, subject, plain=plain, gradients=False)

    base = moved(0.0)
    slopes = _without_leaves_and_what_follows_kinks(
        program, base, _slopes(base, *(moved(step) for step in (STEP, -STEP, STEP / 8)))
    )
    if not slopes:
        return None
    try:
        gradients = gradients_of(_weighted(base, slopes), {n: base.held[n] for n in directions}, subject)
    except Exception as error:  # a refusal, or a write to what backward needs: P3 compares the errors
        return one_line(error) if plain else None
    return _kind_complaint(program, base, gradients) or _size_complaint(base, slopes, gradients, directions)


def _direction(source: Source, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(source.seed ^ seed)
    return torch.randn(source.shape, generator=generator, dtype=getattr(torch, source.dtype))


def _all_plain(program: Program) -> Program:
    return replace(
        program, sources=tuple(replace(s, mask="plain", under=None, storage="dense") for s in program.sources)
    )


def _slopes(base: Outcome, after: Outcome, before: Outcome, nearer: Outcome) -> dict[str, float]:
    """The slopes of values whose every element has a slope: the same on both sides, and with a shorter step."""
    found = {}
    for name, here in base.values.items():
        others = [outcome.values.get(name) for outcome in (after, before, nearer)]
        if not _has_numbers(here) or not all(there is not None and _alike(here, there) for there in others):
            continue
        weights = weighting(here[0], 0)
        numbers, above, below, near = (_weighted_numbers(each, weights) for each in (here, *others) if each is not None)
        forward, backward, short = (above - numbers) / STEP, (numbers - below) / STEP, (near - numbers) / (STEP / 8)
        coarse = 8 * ROUNDING * numbers.abs().max() if numbers.numel() else 0.0
        size = KINK * (forward.abs() + backward.abs()) + coarse
        # Neither comparison is true of NaN and infinity.
        if bool(((forward - backward).abs() <= size).all() and ((short - forward).abs() <= size).all()):
            found[name] = float((forward + backward).sum() / 2)
    return found


def _has_numbers(value: Observed) -> bool:
    """Whether it is differentiable, and of double precision."""
    return value[0].dtype in (torch.float64, torch.complex128) and value[0].requires_grad


def _weighted_numbers(value: Observed, weights: Tensor) -> Tensor:
    """The valid elements as terms of the weighted sum."""
    data, mask = value
    parts = (data.detach() * weights).resolve_conj()
    return _valid((parts.real if parts.is_complex() else parts, mask))


def _valid(value: Observed) -> Tensor:
    """The valid elements, in one dimension."""
    data, mask = value
    return data.detach().reshape(-1) if mask is None else data.detach()[mask]


def _without_leaves_and_what_follows_kinks(
    program: Program, base: Outcome, slopes: Mapping[str, float]
) -> dict[str, float]:
    """The slope of leaves is 1; after an infinite derivative, all later slopes are NaN, as in plain torch."""
    leaves = {source.name for source in program.sources if source.requires_grad}
    rough = {n for n, (data, _) in base.values.items() if data.requires_grad and n not in slopes and n not in leaves}
    # Torch's own sparse tensors have no slope where they specify nothing.
    rough |= {n for n, value in base.held.items() if type(value) is Tensor and value.layout is not torch.strided}
    for step in program.steps:
        if not rough.isdisjoint(step.operands):
            rough.add(step.operands[0] if step.writes else step.name)
    return {name: slope for name, slope in slopes.items() if name not in leaves and name not in rough}


def _alike(mine: Observed, theirs: Observed) -> bool:
    if mine[0].shape != theirs[0].shape:
        return False
    if mine[1] is None or theirs[1] is None:
        return mine[1] is theirs[1]
    return torch.equal(mine[1], theirs[1])


def _size(value: Observed) -> float:
    """The sum of the magnitudes of its valid elements."""
    return float(_valid(value).abs().sum())


def _factor(position: int) -> float:
    """A different weight for each value, so that no two values cancel."""
    return 1 + 0.37 * position


def _weighted(outcome: Outcome, names: Iterable[str]) -> Tensor:
    sums = [weighted_sum([outcome.values[name]]) for name in names]
    return torch.stack([_factor(k) * s for k, s in enumerate(sums) if s is not None]).sum()


def _kind_complaint(program: Program, base: Outcome, gradients: Mapping[str, Observed | None]) -> str | None:
    # (torch lets operators without a derivative, such as logical_and_, write to a leaf, and so to its mask.)
    written = {step.operands[0] for step in program.steps if step.writes}
    for source in program.sources:
        gradient = gradients.get(source.name)
        if gradient is None or source.name not in base.values or source.name in written:
            continue
        mask, wanted = gradient[1], base.values[source.name][1]
        if source.mask == "plain":
            wrong = None if mask is None else "masked, of a plain tensor"
        else:
            everything = torch.ones(source.shape, dtype=torch.bool)
            wrong = mask_difference(everything if mask is None else mask, everything if wanted is None else wanted)
        if wrong:
            return f"gradient of {source.name}: {wrong}"
    return None


def _size_complaint(
    base: Outcome,
    slopes: Mapping[str, float],
    gradients: Mapping[str, Observed | None],
    directions: Mapping[str, Tensor],
) -> str | None:
    terms = torch.cat([torch.zeros(1, dtype=torch.float64), *_terms(gradients, directions)])
    slope = sum(_factor(k) * slopes[name] for k, name in enumerate(slopes))
    size = abs(slope) + float(terms.abs().sum()) + sum(abs(each) for each in slopes.values())
    coarse = ROUNDING * sum(_factor(k) * _size(base.values[name]) for k, name in enumerate(slopes))
    if abs(float(terms.sum()) - slope) <= TOLERANCE * size + 10 * coarse:
        return None
    return f"the gradients give a slope of {float(terms.sum()):.6g}, differences of {', '.join(slopes)} {slope:.6g}"


def _terms(gradients: Mapping[str, Observed | None], directions: Mapping[str, Tensor]) -> list[Tensor]:
    """The contribution of each element of the sources to the slope."""
    given = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    return [_valid((data.detach() * directions[name], mask)) for name, (data, mask) in given.items()]
