"""Tests for rules of your own, as pytest tests: every law in every layout, dtype and device, each with a name.

In a test module::

    from op_registry.testing import instantiate

    test_laws = instantiate(my_library.rules)

makes ``test_laws[mylib.soft_sign.default-P4-csr-float32-cpu]`` and its like. A failure says what was wrong under which
mask, with the line that repeats it. Needs pytest, which op_registry itself does not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
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
    rules: Subjects | Iterable[Subjects],
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
    """A parametrised pytest test: each law of each operator, in each layout, dtype and device.

    rules    rules, or operators that have one: overloads, packets, names; the in-place and out= forms come with them
    laws     of P1 to P8
    layouts  "dense" and the subject's storages, by default all of these; or a registered layout of your own. P3, P4
             and P5 are asked in each, the others in "dense"
    dtypes   names; by default float32 where the operator takes it, and float64 for derivatives (P5)
    devices  what the operator runs on: its results are compared with oracles on the CPU
    allow    laws that may be undecided, each with the reason, for all layouts or one: ``{"P4-packed": "…"}``; one for
             a single layout that nothing needs fails
    subject  the masked tensor that is tested (see :func:`op_registry.conformance.find_subject`)
    most     samples of each operator; None runs them all

    A test fails where its law is broken or undecided, is skipped where the law does not apply to the operator (the
    reason says why), and is an expected failure where the rule names a gap. ``--op-registry-laws``, ``-layouts`` and
    ``-devices`` on pytest's command line go before the arguments, and a table of all verdicts ends the run.

    Raises ValueError for an unknown law or layout and LookupError for an operator without a rule.
    """
    import pytest

    given = [rules] if isinstance(rules, (Rule, OpOverload, OpOverloadPacket, str)) else list(rules)
    asked = _command_line()
    check_names("law", [*(asked.laws or ()), *(key.partition("-")[0] for key in allow or ())], ALL_LAWS)
    found = list(
        cases(
            given,
            laws=[law for law in laws if asked.laws is None or law in asked.laws],
            layouts=asked.layouts if asked.layouts is not None else _names(layouts),
            dtypes=dtypes,
            devices=asked.devices if asked.devices is not None else devices,
            subject=subject,
            most=most,
            seed=seed,
        )
    )
    allowed = dict(allow or {})

    @pytest.mark.parametrize("case", found, ids=[case.name for case in found])
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
            pytest.fail(f"{case.name} may be undecided ({why}), and is not: take the allowance out", pytrace=False)
        gaps = dict.fromkeys(outcome.message for outcome in answer.outcomes if outcome.status == "gap")
        if gaps:
            pytest.xfail("; ".join(gaps))

    return test_law


def _names(layouts: Sequence[str | Layout] | None) -> list[str] | None:
    return None if layouts is None else [each.short if isinstance(each, Layout) else each for each in layouts]


class _Nothing:
    laws = layouts = devices = None


def _command_line() -> Any:
    """What pytest's command line says, where the plugin is there to hear it."""
    plugin = sys.modules.get("op_registry_pytest")
    return plugin.options if plugin is not None else _Nothing
