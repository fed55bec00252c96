"""Pytest tests for your own rules: a named test for every law in every layout, dtype and device.

In a test module::

    from op_registry.testing import instantiate

    test_laws = instantiate(my_library.rules)

generates tests such as ``test_laws[mylib.soft_sign.default-P4-csr-float32-cpu]``. A failure says what was wrong under
which mask, with a command that repeats it. Requires pytest, which op_registry itself does not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch._ops import OpOverload, OpOverloadPacket

from op_registry.conformance.trials import ALL_LAWS
from op_registry.rule import Rule
from op_registry.sparse.layout import Layout
from op_registry.testing.cases import Case, Subjects, allowance, cases, check_names, failure

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["instantiate"]


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
             module stands for every rule that is a global variable of it
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
    found = dict.fromkeys(value for value in vars(rules).values() if isinstance(value, Rule))
    if not found:
        raise ValueError(
            f"the module {rules.__name__} has no rule among its global variables: keep what the registering function "
            "returns, my_rule = elementwise(torch.ops.mylib.f), or pass the operators, instantiate([torch.ops.mylib.f])"
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
