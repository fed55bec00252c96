"""What `check` prints of operators and rules with faults: which side is wrong, and each message once.

The operators are those of a stranger's library; each test registers rules in an overlay.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline as expect
from torch import Tensor

import masked_dispatch as md
from op_registry import check
from op_registry.authoring import (
    ELEMENTWISE,
    Dense,
    Slices,
    Sparse,
    elementwise,
    lowest,
    masked_rule,
    on_call,
    reduction,
)
from op_registry.conformance.plain_torch import wrong_derivative
from op_registry.conformance.sample import Sample
from op_registry.conformance.samples import operators_of

pytestmark = pytest.mark.usefixtures("rules_forgotten")

OWN = torch.ops.printed


def defined(name: str, function: Callable[..., Any], derivative: Callable[..., Any] | None = None) -> None:
    operator = torch.library.custom_op(f"printed::{name}", function, mutates_args=())
    operator.register_fake(lambda *args: function(*args).clone())
    if derivative is not None:
        operator.register_autograd(derivative, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


def total(x: Tensor, dim: int) -> Tensor:
    return x.sum(dim)


def average(x: Tensor, dim: int) -> Tensor:
    return x.mean(dim)


def greatest(x: Tensor, dim: int) -> Tensor:
    return x.argmax(dim)


def furthest(x: Tensor, dim: int) -> Tensor:
    return x.abs().argmax(dim)


def last_greatest(x: Tensor, dim: int) -> Tensor:
    return x.shape[dim] - 1 - x.flip(dim).argmax(dim)


def magnitude(x: Tensor, dim: int) -> Tensor:
    return x.abs().amax(dim)


def doubled(x: Tensor) -> Tensor:
    return x * 2


def squared(x: Tensor) -> Tensor:
    return x * x


def cubed(x: Tensor) -> Tensor:
    return x * x * x


def product(x: Tensor, y: Tensor) -> Tensor:
    return x * y


class Detached(torch.autograd.Function):
    """3 x², of which the derivative is said to be 3."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 3 * x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad


defined("total", total)
defined("average", average)
defined("greatest", greatest)
defined("furthest", furthest)
defined("last_greatest", last_greatest)
defined("magnitude", magnitude)
defined("doubled", doubled, lambda ctx, grad: 2 * grad)
defined("squared", squared, lambda ctx, grad: 2 * grad * ctx.saved_tensors[0])
defined("misdifferentiated", squared, lambda ctx, grad: grad * ctx.saved_tensors[0])
defined("misdifferentiated_twice", cubed, lambda ctx, grad: grad * Detached.apply(ctx.saved_tensors[0]))
defined("raising_in_backward", squared, lambda ctx, grad: grad * ctx.no_such_name)
defined("one_of_two", product, lambda ctx, grad: (grad * ctx.saved_tensors[1], grad * 2 * ctx.saved_tensors[0]))


def printed(name: str, *laws: str, most: int = 1) -> str:
    """What `check` prints, without the lines that repeat a trial, and without line numbers."""
    text = str(check(getattr(OWN, name), laws=laws, most=most))
    kept = [line for line in text.splitlines() if "python -m op_registry" not in line]
    text = re.sub(r"\.py:\d+", ".py:N", "\n".join(kept))
    return "\n".join(textwrap.fill(line, 112, subsequent_indent=" " * 8) for line in text.splitlines())


def test_a_misdeclared_operator_is_told_so() -> None:
    elementwise(OWN.total)
    expect(
        printed("total", "P1", "P2", most=3),
        """\
printed.total.default
  P1 broken            6 trials  all valid: as plain torch
     error in float32 sample 2 stored printed.total.default: in the rule of printed.total.default:
        run_elementwise, elementwise, at tests/conformance/test_printed_verdicts.py:N: ValueError: a result of
        shape () cannot have a mask of shape (5,), which does not broadcast to it (rule.py:N)
  P2 broken           21 trials  valid elements: as the oracle
     broken in float32 sample 2 stored printed.total.default: printed::total is not elementwise: its result has
        shape (), but its operands broadcast to (5,)
     broken in float32 sample 6 stored printed.total.default: printed::total is not elementwise: its result has
        shape (3, 4), but its operands broadcast to (2, 3, 4)
verdict: printed.total.default P1 is broken; printed.total.default P2 is broken""",
    )


def test_a_misdifferentiated_operator_is_told_from_its_rule() -> None:
    elementwise(OWN.misdifferentiated)
    expect(
        printed("misdifferentiated", "P2", "P5"),
        """\
printed.misdifferentiated.default
  P2 holds             8 trials  valid elements: as the oracle
  P5 broken           15 trials  gradients
     broken in float64 sample 0 unstored printed.misdifferentiated.default: the operator's own derivative is
        wrong, not the rule's: the derivative by x along a direction is 4.89427, central differences of the
        plain operator give 9.78854
verdict: printed.misdifferentiated.default P5 is broken""",
    )


def test_a_rule_with_another_derivative_is_told_from_its_operator() -> None:
    @masked_rule(OWN.squared, category=ELEMENTWISE)
    def half_the_slope(x: Dense) -> Dense:
        return x.like(x.filled(1) * x.filled(1).detach())

    expect(
        printed("squared", "P5"),
        """\
printed.squared.default
  P5 broken           15 trials  gradients
     broken in float64 sample 0 unstored printed.squared.default: the rule's gradient 0: 1 of 1 values differ,
        the first -11.959669658526417 instead of -23.919339317052835
     broken in float64 sample 1 one_hole printed.squared.default: the rule's gradient 0: 4 of 4 values differ,
        the first -5.2876099443017495 instead of -10.575219888603499
verdict: printed.squared.default P5 is broken""",
    )


def test_a_right_rule_of_a_misdifferentiated_operator_is_not_blamed() -> None:
    @masked_rule(OWN.misdifferentiated, category=ELEMENTWISE)
    def in_other_operators(x: Dense) -> Dense:
        return x.like(x.filled(1).square())

    (answer,) = check(OWN.misdifferentiated, laws=("P5",), subject="records").answers
    assert {o.message.partition(",")[0] for o in answer.failures} == {"the operator's own derivative is wrong"}
    assert {o.description.split()[3] for o in answer.failures} == {"unstored"}


def test_a_derivative_that_is_meant_to_be_another_is_a_gap() -> None:
    """A straight-through estimator, say: the other masks compare the rule's derivative with the operator's."""
    elementwise(OWN.misdifferentiated).gap("P5", why="it estimates", where="unstored")
    verdict = check(OWN.misdifferentiated, laws=("P5",), subject="records")
    assert verdict, str(verdict)
    assert verdict.of("P5") == "holds"


def test_a_derivative_that_raises_is_no_reason_to_leave_gradients_out() -> None:
    elementwise(OWN.raising_in_backward)
    verdict = check(OWN.raising_in_backward, laws=("P5",), most=1)
    assert not verdict
    assert verdict.of("P5") == "undecided"
    assert "no_such_name" in str(verdict)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("misdifferentiated", "the derivative by x along a direction is"),
        ("misdifferentiated_twice", "the second derivative by x along a direction is"),
        ("one_of_two", "the derivative by y along a direction is"),
        ("squared", None),
        ("doubled", None),
    ],
)
def test_differences_find_which_derivative_is_wrong(name: str, said: str | None) -> None:
    tensors = [torch.linspace(0.5, 2, 6, dtype=torch.float64).reshape(2, 3) for _ in range(1 + (name == "one_of_two"))]
    found = wrong_derivative(Sample(getattr(OWN, name).default, tuple(tensors), {}, 0, torch.float64))
    assert (found is None) == (said is None)
    assert (found or "").startswith(said or "")


@pytest.mark.parametrize("function", [torch.matmul, torch.nn.functional.gelu, torch.pow, torch.std])
def test_torchs_own_derivatives_agree_with_differences(function: Any) -> None:
    for operator in operators_of(function):
        for sample in operator.samples(torch.float64)[:3]:
            assert wrong_derivative(sample) is None


# ----------------------------------------------------------------------------------------- errors of rules and oracles


def test_an_error_in_a_rule_names_the_rule_and_is_printed_once() -> None:
    @masked_rule(OWN.doubled, category=ELEMENTWISE)
    def misspelt(x: Dense) -> Dense:
        return x.like(x.dta * 2)  # type: ignore[attr-defined]

    expect(
        printed("doubled", "P1", "P2", "P3", "P8"),
        """\
printed.doubled.default
  P1 broken            2 trials  all valid: as plain torch
     error in float32 sample 0 unstored printed.doubled.default: in the rule of printed.doubled.default:
        misspelt, elementwise, at tests/conformance/test_printed_verdicts.py:N: AttributeError: 'Dense' object
        has no attribute 'dta' (test_printed_verdicts.py:N)
  P2 broken            7 trials  valid elements: as the oracle
     error in float32 sample 0 stored printed.doubled.default: as under P1
  P3 broken            4 trials  the data under the mask has no effect
     error in float32 sample 0 half printed.doubled.default: as under P1
  P8 broken            2 trials  masked results, or a refusal that names the operator
     error in float32 sample 0 half printed.doubled.default: as under P1
verdict: printed.doubled.default P1 is broken; printed.doubled.default P2 is broken; printed.doubled.default P3
        is broken; printed.doubled.default P8 is broken""",
    )


def test_an_oracles_error_is_told_from_the_rules() -> None:
    rule = elementwise(OWN.doubled)

    @rule.oracle
    def misspelt(x: Any) -> Any:
        return x.dta * 2

    expect(
        printed("doubled", "P1", "P2", "P5"),
        """\
printed.doubled.default
  P1 holds             2 trials  all valid: as plain torch
  P2 broken            8 trials  valid elements: as the oracle
     error in float32 sample 0 stored printed.doubled.default: not the rule, but the oracle of
        printed.doubled.default (misspelt, test_printed_verdicts.py:N) raises AttributeError: 'Expected' object
        has no attribute 'dta'
  P5 broken           15 trials  gradients
     error in float64 sample 0 unstored printed.doubled.default: as under P2
verdict: printed.doubled.default P2 is broken; printed.doubled.default P5 is broken""",
    )


def test_a_plain_result_is_printed_once() -> None:
    @masked_rule(OWN.doubled, category=ELEMENTWISE)
    def loses_the_mask(x: Dense) -> Tensor:
        return x.data * 2

    text = str(check(OWN.doubled, laws=("P1", "P2", "P3", "P8"), most=2))
    assert text.count("which would lose the mask") == 1
    assert text.count(": as under P1") == 3


def test_errors_name_the_rule_in_every_python() -> None:
    """Python 3.10 prints no notes, so that the rule is named in the message itself."""

    @masked_rule(OWN.doubled, category=ELEMENTWISE)
    def raises(x: Dense) -> Dense:
        if x.ndim == 1:
            raise md.MaskedSemanticsError("not of one dimension")
        raise LookupError("nothing found")

    @raises.lowering(Sparse)
    def lowered(op: Any, x: Sparse) -> Sparse:
        raise ArithmeticError("no number")

    x = md.masked_tensor([[1.0, 2.0]], [[True, False]])
    named = r"\n  in the rule of printed\.doubled\.default: raises, elementwise, at \S*test_printed_verdicts\.py:\d+$"
    for operand, error, said in ((x, LookupError, "nothing found"), (x.to_sparse_csr(), ArithmeticError, "no number")):
        with pytest.raises(error, match=f"^{said}{named}") as caught:
            OWN.doubled(operand)
        assert not hasattr(caught.value, "__notes__")
    with pytest.raises(md.MaskedSemanticsError, match=r"^not of one dimension$"):  # the rule's own words to its users
        OWN.doubled(x[0])


# ---------------------------------------------------------------------------------------------------- what to check


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (torch.softmax, ["softmax", "softmax_with_dtype"]),
        (torch.nn.functional.softmax, ["softmax", "softmax_with_dtype"]),
        (torch.Tensor.sum, ["sum"]),
        (torch.cumsum, ["cumsum"]),
    ],
)
def test_a_function_of_torch_stands_for_its_entries(function: Any, names: list[str]) -> None:
    assert [operator.name for operator in operators_of(function)] == names


@pytest.mark.parametrize("what", [squared, 3, torch.nn.Linear, len], ids=["function", "number", "class", "builtin"])
def test_what_is_no_operator_is_refused(what: Any) -> None:
    with pytest.raises(
        TypeError, match=r"is no operator of torch's dispatcher, which rules belong to: pass torch\.ops"
    ):
        check(what)


def test_a_position_that_a_rule_does_not_state() -> None:
    reduction(OWN.greatest, identity=lowest, dims=Slices(positions=()))
    text = str(check(OWN.greatest, laws=("P2",), most=3))
    assert "P2 broken" in text
    assert ". It looks like a position in the slice: dims=Slices(positions=(0,))" in text


def test_a_lowering_that_gives_other_values_is_named() -> None:
    rule = elementwise(OWN.doubled)

    @rule.lowering(Sparse)
    @on_call(sparse="x")
    def tripled(call: Any) -> Any:
        return call.x.like(Dense(call.x.values.data * 3, call.x.values.validity))

    text = str(check(OWN.doubled, laws=("P4",), most=2))
    assert "P4 broken" in text
    assert re.search(r"instead of \S+ \(its lowering is at \S*test_printed_verdicts\.py:\d+\)", text), text


def test_a_number_that_is_no_identity() -> None:
    reduction(OWN.average, identity=0)
    text = str(check(OWN.average, laws=("P2",), most=3))
    assert "P2 broken" in text
    assert (
        ". identity=0 is none of this operator: a slice with one such element more has another result. Write the rule "
        "with over_slices"
    ) in text
    reduction(OWN.total, identity=1)
    assert "identity=1 is none of this operator" in str(check(OWN.total, laws=("P2",), most=3))


# By operator: an identity, and what it gives of two equals that are stored alone, if what is filled in may count.
TIES = {"greatest": (lowest, None), "furthest": (0, None), "last_greatest": (lowest, 2), "magnitude": (1e-3, torch.inf)}


@pytest.mark.parametrize("name", TIES)
def test_elements_that_equal_the_identity(name: str) -> None:
    """Of equals the first is taken, if that is a valid one; a rule for which a fill may count breaks P2."""
    identity, stored_alone = TIES[name]
    op = getattr(OWN, name)
    reduction(op, identity=identity, dims=Slices(positions=() if name == "magnitude" else (0,)))
    values = torch.tensor([[5.0, 0.0, 0.0] if identity == 0 else [5.0, -torch.inf, -torch.inf]])
    x = md.masked_tensor(values, torch.tensor([[False, True, True]]))
    assert op(x.to_sparse_csr(), 1).item() == (stored_alone or 1)
    if stored_alone is None:
        assert op(x, 1).item() == op(x, -1).item() == 1
    verdict = check(op, laws=("P2", "P4"))
    assert bool(verdict) is (stored_alone is None), verdict
    assert stored_alone is None or "is none of this operator" in str(verdict)


def test_what_is_said_of_every_command_line_is_said_once() -> None:
    """A rule in __main__ is registered by no command line."""
    reduction(OWN.average, identity=0)
    verdict = check(OWN.average, laws=("P2", "P3"), most=3)
    remark = "  # the rule is registered in __main__ (a.py:1): move it"
    answers = [
        dataclasses.replace(a, outcomes=tuple(dataclasses.replace(o, repro=o.repro + remark) for o in a.outcomes))
        for a in verdict.answers
    ]
    said: dict[str, str] = {}
    text = "\n".join(answer.text(said) for answer in (*answers, *answers))
    assert text.count("python -m op_registry") > 1
    assert text.count("registered in __main__") == 1
