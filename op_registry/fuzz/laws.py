"""The laws for random programs: P1, P3, P5, P6, P7 and P9. Each law returns a complaint, or None.

P5 is in slopes.py, P9 in padding.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from op_registry.conformance.compare import ROUNDING, bit_difference, difference, mask_difference
from op_registry.conformance.plain_torch import one_line
from op_registry.conformance.subject import Observed, Subject
from op_registry.errors import MaskedSemanticsError
from op_registry.fuzz import sources
from op_registry.fuzz.padding import batch_is_its_samples
from op_registry.fuzz.programs import Program
from op_registry.fuzz.running import Outcome, as_function, execute, observed, results_of, run
from op_registry.fuzz.slopes import gradients_are_slopes

Law = Callable[[Program, Subject], str | None]
Difference = Callable[[Observed, Observed], str | None]
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
    base = run(program, sources.wrapped(program.sources, subject, None), subject)
    for garbage in GARBAGE:
        complaint = _with_garbage(program, subject, garbage, base)
        if complaint is not None:
            return complaint
    return None


def telling_garbage(program: Program, subject: Subject) -> int | None:
    """The garbage with which a program breaks P3."""
    base = run(program, sources.wrapped(program.sources, subject, None), subject)
    return next((g for g in GARBAGE if _with_garbage(program, subject, g, base) is not None), None)


def _with_garbage(program: Program, subject: Subject, garbage: int, base: Outcome) -> str | None:
    other = run(program, sources.wrapped(program.sources, subject, garbage), subject)
    return _first_difference(other, base, _other_bits)


def all_valid_identity(program: Program, subject: Subject) -> str | None:
    """P1: with every element valid, the values, gradients and errors of plain torch."""
    valid = replace(program, sources=tuple(replace(s, mask=_all_valid(s.mask), under=None) for s in program.sources))
    theirs = run(valid, sources.plain(valid.sources), subject, plain=True)
    mine = run(valid, sources.wrapped(valid.sources, subject, None), subject)
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
    return _first_difference(mine, theirs, _to_rounding(theirs))


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
    outcome = run(program, sources.wrapped(program.sources, subject, None), subject)
    for step in program.steps:
        if not step.view or step.name not in outcome.values:
            continue
        again = dict(outcome.held)
        if execute(step, again, program.seed) is None:
            wrong = _other_bits(outcome.values[step.name], observed(again[step.name], subject))
            if wrong is not None:
                return f"{step.name}, a view of {step.operands[0]}, does not show what its base holds: {wrong}"
    return None


def compiled_as_eager(program: Program, subject: Subject) -> str | None:
    """P7: through torch.compile, the same masks and, to rounding, values. Programs that raise in eager are left out."""
    eager = run(program, sources.wrapped(program.sources, subject, None), subject)
    if set(eager.errors) - {"backward"}:
        return None
    mode = subject.modes()["aot_eager"]
    function = as_function(program)
    try:
        results = mode.call(function, *sources.wrapped(program.sources, mode, None).values())
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
    return _first_difference(compiled, Outcome({n: eager.values[n] for n in compiled.values}), _to_rounding(eager))


def _infinities_meet_holes(program: Program, eager: Outcome) -> bool:
    """Whether the program may multiply an infinity with an invalid element.

    A sparse product skips that; in a graph the operands become dense, and the product is NaN (docs/semantics.md).
    """
    contracts = any(CONTRACTIONS.search(step.code) for step in program.steps)
    return contracts and any(bool(data.isinf().any()) for data, _ in eager.values.values() if data.is_floating_point())


def _plain_torch_cannot_compile(program: Program, mode: Subject) -> bool:
    """Whether plain torch refuses the program in a graph, or gives other values there than in eager mode."""
    stand_in = replace(program, steps=tuple(replace(s, code=s.plain or s.code) for s in program.steps))
    eager = run(program, sources.plain(program.sources), mode, plain=True)
    try:
        results = mode.call(as_function(stand_in), *sources.plain(program.sources).values())
    except Exception:
        return True
    return _compiled_difference(stand_in, mode, results, eager) is not None


def _all_valid(mask: str) -> str:
    return mask if mask == "plain" else "unstored"


def _other_bits(got: Observed, want: Observed) -> str | None:
    """How validity differs, or the bits of valid values."""
    return _other_masks(got, want) or bit_difference(got[0], want[0], want[1])


def _to_rounding(outcome: Outcome) -> Difference:
    """How validity differs, or valid values by more than the rounding of the coarsest dtype among a program's values.

    (A wider value or gradient may have been computed from a coarser one.) An all-valid mask equals no mask.
    """
    coarsest = max((ROUNDING.get(data.dtype, 0.0) for data, _ in outcome.values.values()), default=0.0)

    def differs(got: Observed, want: Observed) -> str | None:
        valid = None if got[1] is None or bool(got[1].all()) else got[1]
        wanted = None if want[1] is None or bool(want[1].all()) else want[1]
        unlike = _other_masks((got[0], valid), (want[0], wanted))
        return unlike or difference(got[0], want[0], wanted, coarsest=coarsest)

    return differs


def _other_masks(got: Observed, want: Observed) -> str | None:
    if got[1] is None and want[1] is None:
        return None
    if got[1] is None or want[1] is None:
        return f"{_kind(got)} instead of {_kind(want)}"
    return mask_difference(got[1], want[1])


def _kind(value: Observed) -> str:
    return "a plain tensor" if value[1] is None else "a masked tensor"


def _first_difference(got: Outcome, want: Outcome, differs: Difference) -> str | None:
    """The first value, gradient or error in which two outcomes differ."""
    for name in [*want.errors, *got.errors]:
        mine, theirs = (_without_addresses(o.errors.get(name, "nothing")) for o in (got, want))
        if mine != theirs:
            return f"{name} raises {mine}, instead of {theirs}"
    return _first_of("value", got.values, want.values, differs) or _first_of(
        "gradient", got.gradients, want.gradients, differs
    )


def _first_of(
    what: str, got: Mapping[str, Observed | None], want: Mapping[str, Observed | None], differs: Difference
) -> str | None:
    for name in [*want, *got]:
        mine, theirs = got.get(name), want.get(name)
        if mine is None or theirs is None:
            wrong = None if mine is theirs else f"there is {'none' if mine is None else 'one'} in one of two runs"
        else:
            wrong = differs(mine, theirs)
        if wrong is not None:
            return f"{what} of {name}: {wrong}"
    return None


def _without_addresses(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x...", text)


LAWS: dict[str, Law] = {
    "P1": all_valid_identity,
    "P3": non_interference,
    "P5": gradients_are_slopes,
    "P6": views_alias,
    "P7": compiled_as_eager,
    "P9": batch_is_its_samples,
}
