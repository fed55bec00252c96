"""`masked_dispatch.explain(f, x)` says what happens to a call and changes nothing; densifications are logged."""

from __future__ import annotations

import dataclasses
import logging
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import masked_dispatch as md
from few_elements import even_numbers as x
from few_elements import stored
from masked_dispatch.densification import Densification, on_densify
from op_registry.laws.inside import rules_inside_functions
from op_registry.report.explain import law_of_file, words_of

aten = torch.ops.aten
STORED = ["dense", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged"]


def test_a_dense_call() -> None:
    explanation = md.explain(torch.cumsum, x(), 1)
    (step,) = explanation.steps
    assert step.op is aten.cumsum.default
    assert step.arguments == ("masked float32 of shape (3, 4) (60 bytes)", "1")
    assert step.served.startswith("scan [op_registry/ops/scans/rules.py:")
    assert (step.lowering, step.densified, step.error, explanation.error) == ("", (), "", "")
    assert str(explanation).splitlines()[0] == "torch.cumsum: 1 operator call on masked tensors"


@pytest.mark.parametrize("layout", STORED[1:])
def test_a_call_that_stays_sparse_says_by_which_run(layout: str) -> None:
    explanation = md.explain(torch.cumsum, stored(layout), 1)
    (step,) = explanation.steps
    assert f"as torch.{layout} with " in step.arguments[0]
    assert "op_registry/sparse/slicewise.py:" in step.lowering
    assert explanation.densified == ()
    assert "stays sparse" in str(explanation)


@pytest.mark.parametrize("layout", STORED[1:])
def test_a_call_that_densifies_says_why_and_how_much(layout: str) -> None:
    explanation = md.explain(F.conv1d, stored(layout), torch.randn(2, 3, 2))
    (densification,) = explanation.densified
    assert densification.op == "aten.conv1d.default"
    assert densification.bytes == 12 * 5
    assert f"as torch.{layout} with " in densification.operands[0]
    assert densification.why
    assert explanation.steps[-1].lowering == ""
    assert f"densifies: {densification}" in str(explanation)


def test_pieces_of_a_composite_stand_behind_it() -> None:
    explanation = md.explain(torch.linalg.norm, x())
    assert [(s.op, s.depth, s.composite) for s in explanation.steps] == [
        (aten.linalg_norm.default, 0, True), (aten.linalg_vector_norm.default, 1, False)
    ]  # fmt: skip
    assert "\n    aten.linalg_vector_norm.default(" in str(explanation)


def test_a_function_of_ones_own_a_module_and_a_list() -> None:
    def standardised(t: Any, *, eps: float) -> Any:
        return (t - t.mean()) / (t.std() + eps)

    explanation = md.explain(standardised, x(), eps=1e-3)
    assert [s.op for s in explanation.steps] == [
        aten.mean.default, aten.sub.Tensor, aten.std.correction, aten.add.Tensor, aten.div.Tensor
    ]  # fmt: skip
    assert "standardised: 5 operator calls on masked tensors" in str(explanation)
    assert md.explain(torch.nn.Linear(4, 2), x()).steps[0].op is aten.linear.default
    (step,) = md.explain(torch._foreach_add, [x(), x()], 1.0).steps
    assert step.served == "the operator on each element of its lists"
    assert [s.op for s in md.explain(torch.cat, [x(), torch.ones(1, 4)]).steps] == [aten.cat.default]


def in_one_line(text: object) -> str:
    return " ".join(str(text).split())


def test_without_arguments_it_says_what_a_function_of_torch_means() -> None:
    explanation = md.explain(torch.sort)
    assert (explanation.name, explanation.steps, explanation.error) == ("torch.sort", (), "")
    assert "law       valid elements in order, first, in both directions" in str(explanation)
    assert "equal elements keep the order of the input" in in_one_line(explanation)
    assert "An invalid element of the initial state counts as 0" in in_one_line(md.explain(torch.nn.LSTM))
    assert "where `mask=` itself selects nothing" in in_one_line(md.explain(torch.masked.mean))
    assert "torch.Tensor.add_ is aten.add_" in str(md.explain(torch.Tensor.add_))
    assert len(md.explain(lambda: x().sum()).steps) == 1
    assert "TypeError" in md.explain(torch.nn.Linear(4, 2)).error


def test_everything_that_a_rule_says_is_explained() -> None:
    for op in md.registry:
        rule = md.registry.get(op)
        assert rule is not None
        text = in_one_line(md.explain(op))
        missing = [words for words in (*law_of_file(rule), *words_of(rule)) if in_one_line(words) not in text]
        assert missing == [], op
    for inside in rules_inside_functions():
        if callable(inside.function):
            text = in_one_line(md.explain(inside.function))
            assert [words for words in words_of(inside) if in_one_line(words) not in text] == [], inside


def test_where_no_masked_tensor_takes_part() -> None:
    assert str(md.explain(torch.sum, torch.ones(2))) == "torch.sum: 0 operator calls on masked tensors"


@pytest.mark.parametrize("layout", STORED)
def test_nothing_of_the_callers_changes(layout: str) -> None:
    given = stored(layout).requires_grad_()
    plain, norm = torch.ones(3, 4), torch.nn.BatchNorm1d(4)
    before = (given.to_tensor(-1).detach().clone(), given.get_mask().clone(), torch.get_rng_state())
    version = given._version

    def writes(t: Any, other: Any, into: dict[str, Any]) -> Any:
        t.add_(1)
        other.add_(1)
        into["out"].fill_(3)
        return F.dropout(t)

    target = torch.zeros(2)
    explanation = md.explain(writes, given, plain, {"out": target})
    md.explain(norm, stored(layout))
    assert explanation.steps[0].op is aten.add_.Tensor
    assert explanation.steps[0].served.endswith("aten.add.Tensor written back")
    assert torch.equal(given.to_tensor(-1), before[0])
    assert torch.equal(given.get_mask(), before[1])
    assert torch.equal(torch.get_rng_state(), before[2])
    assert given._version == version
    assert given.grad is None
    assert torch.equal(plain, torch.ones(3, 4))
    assert torch.equal(target, torch.zeros(2))
    assert norm.num_batches_tracked == 0


def test_a_tensor_given_twice_stays_one() -> None:
    given = x()

    def same(a: Any, b: Any) -> Any:
        assert a is b
        return a

    assert md.explain(same, given, given).error == ""


@pytest.mark.parametrize("layout", STORED)
def test_an_error_is_part_of_the_explanation(layout: str) -> None:
    explanation = md.explain(torch.cumsum, stored(layout), 7)
    assert explanation.error.startswith("IndexError: Dimension out of range")
    assert explanation.steps[0].error == explanation.error
    assert "raises IndexError" in str(explanation).splitlines()[0]


def test_a_refusal_names_where_it_comes_from() -> None:
    with md.densify("never"):
        explanation = md.explain(torch.nn.Conv1d(3, 1, 2), x().to_sparse_csr())
    assert explanation.error.startswith("MaskedSemanticsError: torch.nn.functional.conv1d has no sparse form")
    assert explanation.densified == ()


def test_what_fails_before_any_operator() -> None:
    def wrong(t: Any) -> Any:
        raise KeyError("no")

    assert str(md.explain(wrong, x())).endswith("raises KeyError: 'no'")
    with pytest.raises(TypeError, match=r"explain\(torch.cumsum, x, 1\); MaskedTensor is not callable"):
        md.explain(x())  # type: ignore[arg-type]


def test_an_explanation_is_a_frozen_value() -> None:
    explanation = md.explain(torch.exp, x())
    with pytest.raises(dataclasses.FrozenInstanceError):
        explanation.error = "other"  # type: ignore[misc]
    assert repr(explanation) == str(explanation)


@pytest.mark.parametrize("layout", STORED[1:])
def test_operators_of_this_library_are_named_as_such(layout: str) -> None:
    (step,) = md.explain(lambda t: t.to_dense(), stored(layout)).steps
    assert step.op.namespace == "masked_dispatch"
    assert step.served == "an operator of this library, not of torch"
    assert not step.composite
    explanation = md.explain(md.functional.vmap(torch.sin), stored(layout))
    assert explanation.error == ""
    assert aten.sin.default in [s.op for s in explanation.steps]


def test_sizes_are_those_of_the_elements_whatever_memory_they_share() -> None:
    (step,) = md.explain(lambda t: t[0], x()).steps
    assert step.result == "masked float32 of shape (4,) (20 bytes)"


# ------------------------------------------------------------------------------------------------------------ logging


@pytest.mark.parametrize("layout", STORED[1:])
def test_a_densification_is_logged_as_it_happens(layout: str, caplog: pytest.LogCaptureFixture) -> None:
    given = stored(layout)
    with caplog.at_level(logging.INFO, logger="masked_dispatch.densification"):
        given.exp()
        assert caplog.records == []
        F.conv1d(given.without_extent(), torch.randn(2, 3, 2))
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    explanation = record.getMessage()
    assert explanation.startswith(f"aten.conv1d.default stores shape (3, 4) as torch.{layout} with ")
    assert " stored densely, 60 bytes: " in explanation


def test_nothing_is_printed_unless_it_is_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    assert logging.getLogger("masked_dispatch.densification").handlers == []
    F.conv1d(x().to_sparse_csr(), torch.randn(2, 3, 2))
    assert capfd.readouterr() == ("", "")


def test_functions_of_the_library_log_too(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="masked_dispatch.densification"):
        md.functional.vmap(torch.sin)(x().to_sparse_csr())
    assert caplog.records[0].getMessage().startswith("masked_dispatch.functional.vmap stores shape (3, 4)")


def test_what_is_refused_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="masked_dispatch.densification")
    with md.densify("never"), pytest.raises(md.MaskedSemanticsError):
        F.conv1d(x().to_sparse_csr(), torch.randn(2, 3, 2))
    assert caplog.records == []


def test_on_densify_sees_every_thread_and_an_explanation_its_own() -> None:
    def in_two_threads(rows: Any) -> Any:
        other = threading.Thread(target=lambda: F.conv1d(x().to_sparse(), torch.randn(2, 3, 2)))
        other.start()
        other.join()
        return F.conv1d(rows, torch.randn(2, 3, 2))

    reported: list[Densification] = []
    on_densify.append(reported.append)
    try:
        explanation = md.explain(in_two_threads, x().to_sparse_csr())
    finally:
        on_densify.remove(reported.append)
    assert [each.operands[0].split(" ")[4] for each in reported] == ["torch.sparse_coo", "torch.sparse_csr"]
    assert explanation.densified == tuple(reported[1:])
