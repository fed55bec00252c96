"""`op_registry.testing.instantiate`: which tests there are, what they are called, and when they fail."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

import op_registry_pytest
from op_registry import registry
from op_registry.authoring import ELEMENTWISE, Dense, elementwise, masked_rule
from op_registry.conformance.laws.devices import on_device
from op_registry.conformance.trials import ALL_LAWS
from op_registry.testing import instantiate

pytestmark = pytest.mark.usefixtures("rules_forgotten")

SUBJECT = "masked_dispatch.conformance_subject:eager"
LAYOUTS = ("coo", "csr", "csc", "bsr", "bsc", "hybrid", "packed")


@torch.library.custom_op("testing::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


halved.register_fake(torch.empty_like)
halved.register_autograd(lambda ctx, grad: grad / 2)
op = torch.ops.testing.halved


def cases(test: Any) -> list[Any]:
    (mark,) = test.pytestmark
    return list(mark.args[1])


def names(test: Any) -> list[str]:
    (mark,) = test.pytestmark
    assert mark.kwargs["ids"] == [case.name for case in cases(test)]
    return list(mark.kwargs["ids"])


def outcome(test: Any, case: Any) -> tuple[str, str]:
    """What pytest makes of one test: its outcome and what it says."""
    properties: list[Any] = []
    try:
        test(case, lambda name, value: properties.append((name, value)))
    except BaseException as raised:  # pytest's own outcomes are no Exceptions
        return type(raised).__name__, str(raised)
    finally:
        ((name, (operator, law, _)),) = properties
        assert (name, operator, law) == ("op_registry", case.operator.name, case.law)
    return "passed", ""


def test_every_law_layout_dtype_and_device_has_a_name() -> None:
    rule = elementwise(op)
    found = names(instantiate(rule, subject=SUBJECT))
    assert len(set(found)) == len(found)
    ways = [
        "P1-float32", "P2-float32",
        *(f"P3-{layout}-float32" for layout in ("dense", *LAYOUTS)),
        *(f"P4-{layout}-float32" for layout in LAYOUTS),
        *(f"P5-{layout}-float64" for layout in ("dense", *LAYOUTS)),
        "P6-float32", "P7-aot_eager-float32", "P8-float32", "P9-float32", "dims-float32",
        *(f"later-{layout}-float64" for layout in ("dense", *LAYOUTS)),
    ]  # fmt: skip
    assert found == [f"testing.halved.default-{way}-cpu" for way in ways]
    assert names(instantiate([op.default], subject=SUBJECT)) == found
    assert names(instantiate([op, rule], subject=SUBJECT)) == found


def test_a_module_stands_for_the_rules_that_it_holds() -> None:
    module = types.ModuleType("my_rules")
    with pytest.raises(ValueError, match=r"the module my_rules registers no rule, and has none among its global"):
        instantiate(module, subject=SUBJECT)
    module.halved_rule = module.again = elementwise(op)  # type: ignore[attr-defined]
    module.unrelated = 3  # type: ignore[attr-defined]
    assert names(instantiate(module, subject=SUBJECT)) == names(instantiate(op, subject=SUBJECT))


def test_a_module_stands_for_the_rules_that_are_written_in_it() -> None:
    elementwise(op)
    assert names(instantiate(sys.modules[__name__], subject=SUBJECT)) == names(instantiate(op, subject=SUBJECT))


def test_a_packet_names_the_overload_that_has_a_rule() -> None:
    with pytest.raises(LookupError, match=r"halved\.default has no rule to replace"):
        registry.replace(op, lambda x: x)
    elementwise(op)
    assert registry.replace(op, lambda x: x).ops == (op.default,)
    with pytest.raises(TypeError, match=r"aten\.sum has several overloads with a rule: pass one of aten\.sum\.d"):
        registry.replace(torch.ops.aten.sum, lambda x: x)
    with pytest.raises(TypeError, match=r"takes an operator, such as torch\.ops\.mylib\.f, not <built-in method sum"):
        registry.replace(torch.sum, lambda x: x)


def test_laws_layouts_and_dtypes_can_be_chosen() -> None:
    elementwise(op)
    found = names(
        instantiate(op, laws=("P2", "P4"), layouts=("dense", "csr"), dtypes=("float32", "float64"), subject=SUBJECT)
    )
    assert found == [
        f"testing.halved.default-{way}-{dtype}-cpu" for way in ("P2", "P4-csr") for dtype in ("float32", "float64")
    ]


@pytest.mark.parametrize(
    "options, said",
    [
        ({"laws": ("P10",)}, "unknown law P10; use one of P1, P2"),
        ({"layouts": ("ellpack",)}, "unknown layout ellpack; use one of dense, coo, csr"),
        ({"allow": {"P0-csr": "no"}}, "unknown law P0"),
    ],
)
def test_what_there_is_not_is_refused(options: dict[str, Any], said: str) -> None:
    elementwise(op)
    with pytest.raises(ValueError, match=said):
        instantiate(op, subject=SUBJECT, **options)


def test_an_operator_without_a_rule_is_refused() -> None:
    with pytest.raises(LookupError, match="halved has no rule"):
        instantiate(op, subject=SUBJECT)


def test_the_command_line_goes_before_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    elementwise(op)
    monkeypatch.setattr(op_registry_pytest.options, "laws", ("P4", "P5"))
    monkeypatch.setattr(op_registry_pytest.options, "layouts", ("bsr",))
    found = names(instantiate(op, laws=ALL_LAWS[:4], subject=SUBJECT))
    assert found == ["testing.halved.default-P4-bsr-float32-cpu"]
    monkeypatch.setattr(op_registry_pytest.options, "laws", ("P44",))
    with pytest.raises(ValueError, match="unknown law P44"):
        instantiate(op, subject=SUBJECT)


def test_a_right_rule_passes_and_what_does_not_apply_is_skipped_with_its_reason() -> None:
    elementwise(op)
    test = instantiate(op, layouts=("dense", "csr"), subject=SUBJECT)
    outcomes = {case.law: outcome(test, case) for case in cases(test)}
    assert outcomes.pop("P6") == ("Skipped", "P6 does not apply: its schema returns no view")
    assert set(outcomes.values()) == {("passed", "")}


def test_a_wrong_rule_fails_with_a_line_that_repeats_it() -> None:
    masked_rule(op.default, category=ELEMENTWISE)(lambda x: Dense(x.data / 3, x.validity))
    test = instantiate(op, laws=("P1", "P2"), subject=SUBJECT)
    for case in cases(test):
        name, said = outcome(test, case)
        assert name == "Failed"
        assert said.startswith(f"testing.halved.default: {case.law} broken")
        assert f"python -m op_registry check --import test_testing --op testing.halved.default --law {case.law}" in said


def undecided() -> Any:
    """A rule whose only sample has one element in no dimension: no layout but the dense one can store it."""
    rule = elementwise(op)

    @rule.samples
    def one(make: Any) -> Any:
        yield (make(()),)

    return rule


def test_a_law_of_which_nothing_was_asked_fails_unless_it_is_allowed() -> None:
    rule = undecided()
    test = instantiate(rule, laws=("P4",), layouts=("csr",), subject=SUBJECT)
    name, said = outcome(test, cases(test)[0])
    assert name == "Failed"
    assert "P4 undecided" in said
    assert "no tensor that can be stored as csr" in said
    assert "or allow it: instantiate(..., allow={'P4': 'why'})" in said
    for key in ("P4", "P4-csr"):
        allowed = instantiate(rule, laws=("P4",), layouts=("csr",), allow={key: "a number"}, subject=SUBJECT)
        name, said = outcome(allowed, cases(allowed)[0])
        assert name == "Skipped"
        assert said.startswith("P4 is undecided, which is allowed: a number (no trial could test it")


def test_an_allowance_that_nothing_needs_fails() -> None:
    elementwise(op)
    test = instantiate(op, laws=("P4",), layouts=("csr",), allow={"P4-csr": "old"}, subject=SUBJECT)
    name, said = outcome(test, cases(test)[0])
    assert name == "Failed"
    assert said.endswith("is allowed to be undecided (old), but is not: remove the allowance")


def test_a_named_gap_is_an_expected_failure_and_fails_once_it_is_closed() -> None:
    rule = masked_rule(op.default, category=ELEMENTWISE)(lambda x: Dense(x.data / 3, x.validity))
    rule.gap("P2", why="thirds are not implemented")
    test = instantiate(rule, laws=("P2",), subject=SUBJECT)
    name, said = outcome(test, cases(test)[0])
    assert name == "XFailed"
    assert "thirds are not implemented" in said
    with registry.overlay():
        right = registry.replace(op.default, lambda x: Dense(x.data / 2, x.validity))
        right.gap("P2", why="thirds are not implemented")
        test = instantiate(right, laws=("P2",), subject=SUBJECT)
        name, said = outcome(test, cases(test)[0])
    assert name == "Failed"
    assert "a named gap no longer fails" in said


# ------------------------------------------------------------------------------------------------------------ devices


def test_a_device_is_one_of_the_settings() -> None:
    elementwise(op)
    for device, setting in (("cpu", None), ("cuda:1", "cuda:1")):
        (case,) = cases(instantiate(op, laws=("P2",), devices=(device,), subject=SUBJECT))
        assert case.settings.device == setting
        assert case.name.endswith(f"-{device}")


def test_what_is_computed_on_a_device_is_looked_at_on_the_cpu() -> None:
    from masked_dispatch.conformance_subject import eager

    there = on_device(eager, torch.device("meta"))
    value = there.wrap(torch.ones(2, 3), torch.tensor([True, False, True]))
    assert value.device.type == there.placed(torch.ones(3)).device.type == "meta"
    assert there.storages == eager.storages
    assert sorted(there.modes()) == sorted(eager.modes())


# ------------------------------------------------------------------------------------------------------------- plugin


def test_the_table_keeps_the_worst_answer() -> None:
    table = op_registry_pytest.Table()
    for decision in ("holds", "broken", "holds"):
        table.add("a.default", "P4", decision)
    table.add("a.default", "P6", "does not apply")
    table.add("b.default", "P4", "undecided")
    assert [line.split() for line in table.lines()] == [
        ["P4", "P6"], ["a.default", "broken", "-"], ["b.default", "undecided"]
    ]  # fmt: skip


def test_the_header_says_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert op_registry_pytest.pytest_report_header() == []
    monkeypatch.setattr(op_registry_pytest.options, "devices", ("cpu", "cuda"))
    assert op_registry_pytest.pytest_report_header() == ["op_registry: devices cpu, cuda"]
