"""What masked_dispatch/torch_internals.py assumes of torch: each assumption has a check, which this torch passes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

from masked_dispatch import assumptions, torch_internals
from masked_dispatch.assumptions import compiler, dispatch, distributed, engine, graphs
from masked_dispatch.assumptions.checks import (
    ASSUMPTIONS,
    Assumption,
    assumed,
    assumption,
    expect,
    expect_equal,
    raises,
    replaced,
)

ROOM = Path(assumptions.__file__).parent
MODULES = (compiler, dispatch, distributed, engine, graphs)
SILENT = [check for check in ASSUMPTIONS if check.silent]


@pytest.mark.parametrize("check", ASSUMPTIONS, ids=lambda check: f"{check.number}-{check.title}")
def test_torch_is_as_assumed(check: Assumption) -> None:
    check.run()


def test_each_number_has_a_check() -> None:
    listed = [int(number) for number in re.findall(r"^ *(\d+)\. ", torch_internals.__doc__ or "", re.MULTILINE)]
    assert listed == list(range(1, len(listed) + 1))
    assert {check.number for check in ASSUMPTIONS} == set(listed)


def test_silent_are_those_by_which_calls_reach_rules_and_gradients_add_up() -> None:
    assert sorted(check.number for check in SILENT) == [1, 2, 4, 16, 17, 45, 47]


def test_a_broken_assumption_names_torch_and_what_was_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "in_forward_mode", lambda: True)
    (check,) = (check for check in ASSUMPTIONS if check.number == 22)
    words = f"torch {torch.__version__} no longer holds that forward_ad._current_level is negative outside"
    with pytest.raises(AssertionError, match=re.escape(words)):
        check.run()


def test_what_breaks_an_assumption_may_be_any_exception() -> None:
    with (
        pytest.raises(AssertionError, match=r"no longer holds that it is there: no such thing") as caught,
        assumed("it is there"),
    ):
        raise AttributeError("no such thing")
    assert isinstance(caught.value.__cause__, AttributeError)


def test_expectations_raise_with_what_was_found() -> None:
    expect(True)
    expect_equal([1], [1])
    with pytest.raises(AssertionError, match=r"^it is not so$"):
        expect(False)
    with pytest.raises(AssertionError, match=r"^found \[2\]$"):
        expect(None, [2])
    with pytest.raises(AssertionError, match=r"^found 1, expected 2$"):
        expect_equal(1, 2)


def test_no_check_is_an_assert_statement() -> None:
    """python -O drops these."""
    for path in ROOM.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)] == [], path.name


def test_exceptions_are_expected_by_kind_and_text() -> None:
    with raises(ValueError, "of two") as raised:
        raise ValueError("one of two")
    assert str(raised.error) == "one of two"
    with pytest.raises(AssertionError, match=r"^no ValueError was raised$"), raises(ValueError):
        pass
    with pytest.raises(AssertionError, match=r"^found ValueError\('another'\)$"), raises(ValueError, "one of two"):
        raise ValueError("another")
    with pytest.raises(TypeError, match="of another kind"), raises(ValueError):
        raise TypeError("of another kind")


def test_what_is_replaced_is_there_again() -> None:
    class Owner:
        value = 1

    with replaced(Owner, "value", 2):
        assert Owner.value == 2
        Owner.value = 3
    assert Owner.value == 1


def test_two_checks_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("masked_dispatch.assumptions.checks.ASSUMPTIONS", made := [])

    @assumption(50, silent=True)
    def one_of_two() -> None: ...

    assert made == [Assumption(50, "one of two", one_of_two, True)]
    with pytest.raises(ValueError, match="there is a check called 'one of two' already"):
        assumption(51)(one_of_two)


def test_checks_are_functions_of_the_modules_that_are_listed() -> None:
    assert {check.run.__module__ for check in ASSUMPTIONS} == {module.__name__ for module in MODULES}
