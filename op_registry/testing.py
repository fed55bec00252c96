"""Pytest tests for your own rules: a named test for every law in every layout, dtype and device.

In a test module::

    from op_registry.testing import instantiate

    test_laws = instantiate(my_library.rules)

generates tests such as ``test_laws[mylib.soft_sign.default-P4-csr-float32-cpu]``. A failure says what was wrong under
which mask, with a command that repeats it. Requires pytest, which op_registry itself does not.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from op_registry.conformance.laws import LAWS
from op_registry.conformance.sample import Operator
from op_registry.conformance.samples import operators_of
from op_registry.conformance.subject import find_subject
from op_registry.conformance.trials import ALL_LAWS, Settings, dtypes_of, exemption, run_operator
from op_registry.conformance.verdict import Answer, answer_of
from op_registry.registry import registry
from op_registry.rule import Rule, path_in_package
from op_registry.sparse.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Callable


def instantiate(
    rules: Subjects | Iterable[Subjects] | ModuleType,
    *,
    laws: Sequence[str] = ALL_LAWS,
    layouts: Sequence[str | Layout] | None = None,
    dtypes: Sequence[str] | None = None,
    devices: Sequence[str] = ("cpu",),
    allow: Mapping[str, str] | None = None,
    subject: str | None = None,
    most: int | None = 4,
    seed: int = 0,
) -> Callable[..., None]:
    """A parametrised pytest test of each law of each operator, in each layout, dtype and device.

    rules    rules, or operators that have one: overloads, packets, names; their in-place and out= forms are included. A
             module stands for every rule that is written in it, or a global variable of it
    laws     any of P1 to P9, "dims" and "later"
    layouts  "dense", storages of the subject (by default all of these), or a registered layout of your own. P3, P4 and
             P5 run in each of them, the other laws in "dense"
    dtypes   names; by default float32 if the operator takes it, and float64 for derivatives (P5)
    devices  the devices to run the operator on; its results are compared with oracles on the CPU
    allow    laws that may be undecided, each with the reason, for all layouts or for one: ``{"P4-packed": "…"}``; an
             allowance for one layout that is not needed fails
    subject  the masked tensor to test (see :func:`op_registry.conformance.find_subject`)
    most     the most samples of each operator; None runs them all

    A test fails if its law is broken or undecided, is skipped if the law does not apply to the operator (with the
    reason), and is an expected failure if the rule names a gap. The pytest options ``--op-registry-laws``,
    ``--op-registry-layouts`` and ``--op-registry-devices`` override the arguments, and a table of all decisions is
    printed at the end of the run.

    Raises ValueError for an unknown law or layout, or a module without rules, and LookupError for an operator without a
    rule.
    """
    import pytest

    subjects = _subjects(rules)
    options = _command_line()
    check_names("law", [*(options.laws or ()), *(key.partition("-")[0] for key in allow or ())], ALL_LAWS)
    all_cases = list(
        cases(
            subjects,
            laws=[law for law in laws if options.laws is None or law in options.laws],
            layouts=options.layouts if options.layouts is not None else _names(layouts),
            dtypes=dtypes,
            devices=options.devices if options.devices is not None else devices,
            subject=subject,
            most=most,
            seed=seed,
        )
    )
    allowed = dict(allow or {})

    @pytest.mark.parametrize("case", all_cases, ids=[case.name for case in all_cases])
    def test_law(case: Case, record_property: Callable[[str, Any], None]) -> None:
        answer = case.answer()
        record_property("op_registry", (case.operator.name, case.law, answer.decision))
        why = allowance(case, allowed)
        if answer.decision == "undecided" and why is not None:
            pytest.skip(f"{case.law} is undecided, which is allowed: {why} ({answer.reason})")
        if answer.decision == "does not apply":
            pytest.skip(f"{case.law} does not apply: {answer.reason}")
        if answer.decision in ("broken", "undecided"):
            pytest.fail(failure(answer), pytrace=False)
        if why is not None and f"{case.law}-{case.way}" in allowed:
            pytest.fail(
                f"{case.name} is allowed to be undecided ({why}), but is not: remove the allowance", pytrace=False
            )
        gaps = dict.fromkeys(outcome.message for outcome in answer.outcomes if outcome.status == "gap")
        if gaps:
            pytest.xfail("; ".join(gaps))

    return test_law


def _subjects(rules: Subjects | Iterable[Subjects] | ModuleType) -> list[Subjects]:
    if isinstance(rules, (Rule, OpOverload, OpOverloadPacket, str)):
        return [rules]
    if not isinstance(rules, ModuleType):
        return list(rules)
    held = [value for value in vars(rules).values() if isinstance(value, Rule)]
    path = path_in_package(getattr(rules, "__file__", None) or "", rules.__name__)
    found = dict.fromkeys([*held, *(rule for rule in registry.rules() if rule.where.rpartition(":")[0] == path)])
    if not found:
        raise ValueError(
            f"the module {rules.__name__} registers no rule, and has none among its global variables: pass the "
            "operators, instantiate([torch.ops.mylib.f])"
        )
    return list(found)


def _names(layouts: Sequence[str | Layout] | None) -> list[str] | None:
    return None if layouts is None else [layout.short if isinstance(layout, Layout) else layout for layout in layouts]


class _NoOptions:
    laws = layouts = devices = None


def _command_line() -> Any:
    """The options on pytest's command line; none if the plugin is not loaded."""
    plugin = sys.modules.get("op_registry_pytest")
    return plugin.options if plugin is not None else _NoOptions


# ------------------------------ The test cases for rules: one for each operator, law, layout or mode, dtype and device.

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
                subject=subject,
                device=None if device == "cpu" else device,
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


def _ways(name: str, layouts: Sequence[str], settings: Settings) -> Iterator[tuple[str, Settings]]:
    """The layouts or modes in which a law is tested, each with its settings."""
    law = LAWS[name]
    if law.in_mode is not None:
        yield from ((mode, dataclasses.replace(settings, modes=(mode,))) for mode in MODES)
    elif law.stored is None:
        yield from [("", dataclasses.replace(settings, also_stored=()))] if DENSE in layouts else ()
    else:
        for layout in layouts:
            if layout != DENSE:
                yield layout, dataclasses.replace(settings, storages=(layout,), also_stored=(layout,), dense=False)
            elif law.check is not None:
                yield DENSE, dataclasses.replace(settings, also_stored=())


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
