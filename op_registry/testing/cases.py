"""The test cases for rules: one for each operator, law, layout or mode, dtype and device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch._ops import OpOverload, OpOverloadPacket

from op_registry.conformance.applicability import exemption
from op_registry.conformance.sample import Operator
from op_registry.conformance.samples import operators_of
from op_registry.conformance.subjects import find_subject
from op_registry.conformance.trials import ALL_LAWS, STORED, Settings, dtypes_of, run_operator
from op_registry.conformance.verdict import Answer, answer_of
from op_registry.rule import Rule
from op_registry.testing.device import subject_on

# The layout in which every law but P4 is tested; P3, P4, P5 and "later" are tested in the others too.
DENSE = "dense"
# The modes that P7 compares with eager.
MODES = ("aot_eager",)
Subjects = Rule | OpOverload | OpOverloadPacket | str


@dataclass(frozen=True)
class Case:
    """One test: a law of an operator, in one layout or mode (`way`), in one dtype and on one device.

    why   why the law does not apply to the operator; "" if it does
    """

    operator: Operator = field(compare=False)
    law: str
    way: str
    dtype: torch.dtype
    device: str
    settings: Settings
    why: str = ""

    @property
    def name(self) -> str:
        """The id of the pytest test: ``mylib.soft_sign.default-P4-csr-float32-cpu``."""
        dtype = str(self.dtype).removeprefix("torch.")
        return "-".join([self.operator.name, self.law, *([self.way] if self.way else []), dtype, self.device])

    def answer(self) -> Answer:
        """Run the law's trials."""
        if self.why:
            return Answer(self.operator.name, self.law, "does not apply", 0, self.why)
        return answer_of(run_operator(self.operator, self.settings), self.law)


def cases(
    subjects: Iterable[Subjects],
    *,
    laws: Sequence[str],
    layouts: Sequence[str] | None,
    dtypes: Sequence[str] | None,
    devices: Sequence[str],
    subject: str | None,
    most: int | None,
    seed: int,
) -> Iterator[Case]:
    """The test cases of operators; see :func:`op_registry.testing.instantiate` for the arguments."""
    check_names("law", laws, ALL_LAWS)
    tested = find_subject(subject)
    known = (DENSE, *tested.storages)
    layouts = known if layouts is None else layouts
    check_names("layout", [layout for layout in layouts if not tested.can_store(layout)], known)
    for operator in _operators(subjects):
        for device in devices:
            base = Settings(
                subject=subject_on(device, subject),
                most=most,
                seed=seed,
                dtypes=",".join(dtypes) if dtypes is not None else "preferred",
            )
            for law in laws:
                why = exemption(operator, law, seed) or ""
                for dtype in dtypes_of(operator, law, base) or [operator.preferred_dtype]:
                    for_law = dataclasses.replace(base, laws=(law,), dtypes=str(dtype).removeprefix("torch."))
                    for way, settings in [("", for_law)] if why else _ways(law, layouts, for_law):
                        yield Case(operator, law, way, dtype, device, settings, why)


def _ways(law: str, layouts: Sequence[str], settings: Settings) -> Iterator[tuple[str, Settings]]:
    """The layouts or modes in which a law is tested, each with its settings."""
    if law == "P7":
        yield from ((mode, dataclasses.replace(settings, modes=(mode,))) for mode in MODES)
        return
    for layout in layouts:
        if layout == DENSE and law != "P4":
            yield (DENSE if law in STORED else ""), dataclasses.replace(settings, also_stored=())
        elif layout != DENSE and law in STORED:
            yield layout, dataclasses.replace(settings, storages=(layout,), also_stored=(layout,), dense=False)


def _operators(subjects: Iterable[Subjects]) -> Iterator[Operator]:
    """The operators to test, with the in-place and out= forms that their library has, without duplicates."""
    seen: set[str] = set()
    for subject in subjects:
        for op in subject.ops if isinstance(subject, Rule) else (subject,):
            for operator in operators_of(op):
                if operator.name not in seen:
                    seen.add(operator.name)
                    yield operator


def check_names(kind: str, names: Iterable[str], known: Sequence[str]) -> None:
    """ValueError for an unknown name."""
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"unknown {kind} {', '.join(unknown)}; use one of {', '.join(known)}")


def allowance(case: Case, allow: Mapping[str, str]) -> str | None:
    """The reason why a case may be undecided, under the key ``P4-csr`` or ``P4``; None if it may not."""
    return allow.get(f"{case.law}-{case.way}", allow.get(case.law))


def failure(answer: Answer) -> str:
    """The message of a failing test: the law, each failure with a command that repeats it, and what to do."""
    lines = [f"{answer.operator}: {answer}"]
    if answer.decision == "undecided":
        lines.append(
            "An untested law does not count as one that holds. Give the rule samples that test it (@rule.samples), or "
            f"allow it: instantiate(..., allow={{{answer.law!r}: 'why'}})."
        )
    return "\n".join(lines)
