"""The laws for random programs: P1, P3, P5, P6, P7 and P9. Each law returns a complaint, or None.

P9 is in padding.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.compare import BITS, ROUNDING, Tolerance, mask_difference, value_difference
from op_registry.conformance.plain_torch import one_line, weighted_sum, weighting
from op_registry.conformance.subject import Observed, Subject
from op_registry.errors import MaskedSemanticsError
from op_registry.fuzz import programs
from op_registry.fuzz.padding import batch_is_its_samples
from op_registry.fuzz.programs import (
    Outcome,
    Program,
    Source,
    as_function,
    execute,
    gradients_of,
    observed,
    results_of,
    run,
)

Law = Callable[[Program, Subject], str | None]
REFUSED = MaskedSemanticsError.__name__

# Writes that a graph cannot do and refuses (docs/semantics.md): they would replace the stored tensors of its inputs.
REFUSED_IN_A_GRAPH = re.compile(
    "a graph cannot replace what its argument stores|inside a compiled region, this write would change how the mask"
    "|Attempted to wrap sparse Tensor"  # torch doesn't compile code with torch.sparse tensors
)
CONTRACTIONS = re.compile("@|mm|matmul|linear|dot|einsum|conv|mv|kron|attention|tensordot|cdist")
# Seeds of the garbage under the masks; we compare each run with the one on the data as drawn.
GARBAGE = (0, 1)


def non_interference(program: Program, subject: Subject) -> str | None:
    """P3: with other garbage under the masks, the same values, masks, gradients and errors, bit for bit."""
    found = telling_garbage(program, subject)
    return None if found is None else found[1]


def telling_garbage(program: Program, subject: Subject) -> tuple[int, str] | None:
    """The garbage with which a program breaks P3, and how it does."""
    base = run(program, programs.wrapped(program.sources, subject, None), subject)
    for garbage in GARBAGE:
        other = run(program, programs.wrapped(program.sources, subject, garbage), subject)
        complaint = _first_difference(other, base, BITS)
        if complaint is not None:
            return garbage, complaint
    return None


def all_valid_identity(program: Program, subject: Subject) -> str | None:
    """P1: with every element valid, the values, gradients and errors of plain torch."""
    sources = (replace(s, mask=s.mask if s.mask == "plain" else "unstored", under=None) for s in program.sources)
    valid = replace(program, sources=tuple(sources))
    theirs = run(valid, programs.plain(valid.sources), subject, plain=True)
    mine = run(valid, programs.wrapped(valid.sources, subject, None), subject)
    if any(where.startswith("reading") or error.startswith(REFUSED) for where, error in mine.errors.items()):
        return None  # after a refusal, later steps have other operands
    # The law doesn't say which tensors backward saves, and so which writes make it raise.
    no_backward = "backward" in mine.errors or "backward" in theirs.errors
    for outcome in (mine, theirs):
        outcome.errors = {n: error.partition(":")[0] for n, error in outcome.errors.items() if n != "backward"}
        outcome.gradients = {} if no_backward else outcome.gradients
    both = set(mine.values) & set(theirs.values)
    mine.values = {name: value for name, value in mine.values.items() if name in both}
    theirs.values = {name: value for name, value in theirs.values.items() if name in both}
    mine, theirs = _with_zero_gradients(mine, theirs), _with_zero_gradients(theirs, mine)
    return _first_difference(mine, theirs, _rounding_of(theirs))


def _with_zero_gradients(outcome: Outcome, other: Outcome) -> Outcome:
    """The outcome with zeros for each missing gradient that the other one has: torch may return either."""
    zeros = {
        name: (torch.zeros_like(gradient[0]), gradient[1])
        for name, gradient in other.gradients.items()
        if gradient is not None and outcome.gradients.get(name) is None
    }
    return replace(outcome, gradients={**outcome.gradients, **zeros})


def views_alias(program: Program, subject: Subject) -> str | None:
    """P6: at the end of the program, each view shows its base's current elements."""
    outcome = run(program, programs.wrapped(program.sources, subject, None), subject)
    for step in program.steps:
        if not step.view or step.name not in outcome.values:
            continue
        again = dict(outcome.held)
        if execute(step, again, program.seed) is None:
            wrong = value_difference(outcome.values[step.name], observed(again[step.name], subject), BITS)
            if wrong is not None:
                return f"{step.name}, a view of {step.operands[0]}, does not show what its base holds: {wrong}"
    return None


def compiled_as_eager(program: Program, subject: Subject) -> str | None:
    """P7: through torch.compile, the same masks and, to rounding, values. Programs that raise in eager are left out."""
    eager = run(program, programs.wrapped(program.sources, subject, None), subject)
    if set(eager.errors) - {"backward"}:
        return None
    mode = subject.modes()["aot_eager"]
    function = as_function(program)
    try:
        results = mode.call(function, *programs.wrapped(program.sources, mode, None).values())
    except Exception as error:
        if REFUSED_IN_A_GRAPH.search(str(error)) or _plain_torch_cannot_compile(program, mode):
            return None
        return f"compiled, it raises {one_line(error)}"
    complaint = _compiled_difference(program, mode, results, eager)
    excused = complaint is not None and (
        _infinities_meet_holes(program, eager) or _plain_torch_cannot_compile(program, mode)
    )
    return None if excused else complaint


def _compiled_difference(program: Program, mode: Subject, results: Sequence[Any], eager: Outcome) -> str | None:
    compiled = Outcome({n: observed(r, mode) for n, r in zip(results_of(program), results, strict=True)})
    return _first_difference(compiled, Outcome({n: eager.values[n] for n in compiled.values}), _rounding_of(eager))


def _infinities_meet_holes(program: Program, eager: Outcome) -> bool:
    """Whether the program may multiply an infinity with an invalid element.

    A sparse product skips that; in a graph the operands become dense, and the product is NaN (docs/semantics.md).
    """
    contracts = any(CONTRACTIONS.search(step.code) for step in program.steps)
    return contracts and any(bool(data.isinf().any()) for data, _ in eager.values.values() if data.is_floating_point())


def _plain_torch_cannot_compile(program: Program, mode: Subject) -> bool:
    """Whether plain torch refuses the program in a graph, or gives other values there than in eager mode."""
    stand_in = replace(program, steps=tuple(replace(s, code=s.plain or s.code) for s in program.steps))
    eager = run(program, programs.plain(program.sources), mode, plain=True)
    try:
        results = mode.call(as_function(stand_in), *programs.plain(program.sources).values())
    except Exception:
        return True
    return _compiled_difference(stand_in, mode, results, eager) is not None


# ---------------------------------------------------------------------------------------------- how two outcomes differ


def _rounding_of(outcome: Outcome) -> Tolerance:
    """The rounding of the coarsest dtype among a program's values: a wider one may have been computed from it."""
    return Tolerance(coarsest=max((ROUNDING.get(data.dtype, 0.0) for data, _ in outcome.values.values()), default=0.0))


def _plain_if_valid(value: Observed) -> Observed:
    """An all-valid mask equals no mask."""
    return value if value[1] is None or not bool(value[1].all()) else (value[0], None)


def _first_difference(got: Outcome, want: Outcome, tolerance: Tolerance) -> str | None:
    """The first value, gradient or error in which two outcomes differ."""
    for name in [*want.errors, *got.errors]:
        mine, theirs = (re.sub(r"0x[0-9a-f]+", "0x...", o.errors.get(name, "nothing")) for o in (got, want))
        if mine != theirs:
            return f"{name} raises {mine}, instead of {theirs}"
    return _first_of("value", got.values, want.values, tolerance) or _first_of(
        "gradient", got.gradients, want.gradients, tolerance
    )


def _first_of(
    what: str, got: Mapping[str, Observed | None], want: Mapping[str, Observed | None], tolerance: Tolerance
) -> str | None:
    for name in [*want, *got]:
        mine, theirs = got.get(name), want.get(name)
        if mine is None or theirs is None:
            wrong = None if mine is theirs else f"there is {'none' if mine is None else 'one'} in one of two runs"
        else:
            both = (mine, theirs) if tolerance.bits else (_plain_if_valid(mine), _plain_if_valid(theirs))
            wrong = value_difference(*both, tolerance)
        if wrong is not None:
            return f"{what} of {name}: {wrong}"
    return None


# ----------------------------------------------------------------------------------------- P5: gradients against slopes

# We move the sources that require grad a little to either side, along a random direction that also moves hidden
# elements. The slope is the change of the weighted sum of the valid values. Values without a slope (they jump, have a
# kink, or are not finite) are left out before we take the gradient.

STEP = 1e-6
# The same dtypes, shapes and masks.
SHAPES = Tolerance(values=False)
# If the slopes on the two sides differ by more than this share of their size, there is a kink or a large curvature.
KINK = 1e-3
TOLERANCE = 1e-4
# The error of a difference, relative to the terms of the sum: their rounding errors, divided by the step.
ERROR_OF_A_DIFFERENCE = 1e-15 / STEP


def gradients_are_slopes(program: Program, subject: Subject) -> str | None:
    """P5: gradients have the masks of their tensors, and agree with the slopes measured by differences."""
    complaint = _complaint(program, subject, plain=False)
    if complaint is not None and _complaint(_all_plain(program), subject, plain=True) is not None:
        return None  # torch defines another derivative (of renorm, say), or none, or the measurement is too coarse here
    return complaint


def _complaint(program: Program, subject: Subject, plain: bool) -> str | None:
    data = {source.name: programs.data_of(source) for source in program.sources}
    directions = {s.name: _direction(s, program.seed) for s in program.sources if s.requires_grad}
    if not directions or any(each.dtype is not torch.float64 for each in directions.values()):
        return None

    def moved(step: float) -> Outcome:
        there = {name: x + step * directions[name] if name in directions else x for name, x in data.items()}
        values = programs.wrapped(program.sources, subject, None, data=there)
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
        precise = here[0].dtype in (torch.float64, torch.complex128) and here[0].requires_grad
        if not precise or not all(there is not None and not value_difference(here, there, SHAPES) for there in others):
            continue
        weights = weighting(here[0], 0)
        numbers, above, below, near = (_weighted_numbers(each, weights) for each in (here, *others) if each is not None)
        forward, backward, short = (above - numbers) / STEP, (numbers - below) / STEP, (near - numbers) / (STEP / 8)
        coarse = 8 * ERROR_OF_A_DIFFERENCE * numbers.abs().max() if numbers.numel() else 0.0
        size = KINK * (forward.abs() + backward.abs()) + coarse
        # Neither comparison is true of NaN and infinity.
        if bool(((forward - backward).abs() <= size).all() and ((short - forward).abs() <= size).all()):
            found[name] = float((forward + backward).sum() / 2)
    return found


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
    coarse = ERROR_OF_A_DIFFERENCE * sum(_factor(k) * _size(base.values[name]) for k, name in enumerate(slopes))
    if abs(float(terms.sum()) - slope) <= TOLERANCE * size + 10 * coarse:
        return None
    return f"the gradients give a slope of {float(terms.sum()):.6g}, differences of {', '.join(slopes)} {slope:.6g}"


def _terms(gradients: Mapping[str, Observed | None], directions: Mapping[str, Tensor]) -> list[Tensor]:
    """The contribution of each element of the sources to the slope."""
    given = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    return [_valid((data.detach() * directions[name], mask)) for name, (data, mask) in given.items()]


LAWS: dict[str, Law] = {
    "P1": all_valid_identity,
    "P3": non_interference,
    "P5": gradients_are_slopes,
    "P6": views_alias,
    "P7": compiled_as_eager,
    "P9": batch_is_its_samples,
}
