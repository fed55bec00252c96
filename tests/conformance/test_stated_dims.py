"""What rules state of their dimensions: every rule does, and the law "dims" notices a wrong statement."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from op_registry import registry
from op_registry.authoring import ELEMENTWISE, Equation, Slices
from op_registry.conformance.law import Broken
from op_registry.conformance.laws import dimensions as stated_dims
from op_registry.conformance.laws.dimensions import Shown, Together
from op_registry.conformance.own_operators import RegisteredOperator
from op_registry.conformance.trials import Settings, run_operator
from op_registry.dimensions.labels import Dimensions
from op_registry.report import coverage

aten = torch.ops.aten


def test_every_rule_states_its_dimensions() -> None:
    assert [rule.name for rule in registry.rules() if rule.dims is None] == []


def test_what_is_not_asked_has_a_rule() -> None:
    rules = {rule.name for rule in registry.rules()}
    assert set(stated_dims.NOT_ASKED) <= rules


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


SCALE, ZERO, YES = torch.tensor([0.5, 0.25, 1.0]), torch.zeros(3, dtype=torch.int32), torch.ones(1)
PLACES = torch.tensor([[0, 2, 1], [1, 0, 0]])
# Calls of operators that no entry of torch's database calls.
CALLS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten._scaled_dot_product_flash_attention_for_cpu.default, (numbers(2, 3, 4, 5), *[numbers(2, 3, 6, 5)] * 2)),
    (aten.fake_quantize_per_channel_affine_cachemask.default, (numbers(2, 3), SCALE, ZERO, 1, -9, 9)),
    (aten.log_sigmoid_forward.default, (numbers(2, 3),)),
    (aten.fill.Tensor, (numbers(2, 3), numbers(1)[0])),
    (aten.copy.default, (numbers(2, 3), numbers(3))),
    (aten.scatter.reduce, (numbers(2, 4), 1, PLACES, numbers(2, 3), {"reduce": "add"})),
    (aten.scatter.value, (numbers(3, 4), 1, PLACES, 0.5)),
    (aten.nll_loss_forward.default, (numbers(4, 3), torch.tensor([0, 2, 1, 1]), SCALE, 0, -100)),
    (aten.nll_loss_forward.default, (numbers(4, 3), torch.tensor([0, 2, 1, 1]), SCALE, 1, -100)),
    (aten.nll_loss2d_forward.default, (numbers(2, 3, 1, 3), PLACES[:, None], None, 0, -100)),
    (aten.unsafe_split_with_sizes.default, (numbers(2, 3), [1, 2], 1)),
    (aten._softmax.default, (numbers(2, 3), 0, False)),
    (aten._is_all_true.default, (torch.ones(2, 3, dtype=torch.bool),)),
    (aten.convolution.default, (numbers(2, 4, 5), numbers(6, 2, 3), numbers(6), [1], [1], [1], False, [0], 2)),
    (aten.convolution.default, (numbers(2, 4, 5), numbers(4, 3, 3), numbers(6), [1], [1], [1], True, [0], 2)),
    (aten.conv_tbc.default, (numbers(5, 2, 3), numbers(3, 3, 4), numbers(4), 1)),
    (aten.upsample_nearest1d.default, (numbers(2, 3, 4), [6])),
    (aten.upsample_bilinear2d.default, (numbers(2, 3, 4, 4), [6, 3], False)),
    (aten.cauchy.default, (numbers(2, 3),)),
    (aten.bernoulli.Tensor, (numbers(2, 3), numbers(2, 3).sigmoid())),
    (aten.native_dropout.default, (numbers(2, 3), 0.5, True)),
    (aten.gather.default, (numbers(3, 4), 1, PLACES)),
]


CALLED = {op for calls in coverage.known_calls().values() for op in calls.ops}


@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter")  # which torch says once in a process
@pytest.mark.parametrize(("op", "args"), CALLS)
def test_statements_hold_where_no_entry_calls_the_operator(op: Any, args: tuple[Any, ...]) -> None:
    rule = registry.get(op)
    assert rule is not None
    assert rule.dims is not None
    shown = Shown(op, rule.dims, Together())
    keywords = args[-1] if isinstance(args[-1], dict) else {}
    shown.ask(args[: -1 if keywords else None], keywords)
    assert shown.calls == 1


def test_statements_hold_for_the_samples_of_rules() -> None:
    wrong, asked = [], 0
    for rule in list(registry.rules()):
        for op in rule.ops if rule.sample_makers or rule.category is ELEMENTWISE else ():
            if op not in CALLED:
                outcomes = list(stated_dims.outcomes(RegisteredOperator(op)))
                asked += any(status == "pass" for _, status, _ in outcomes)
                wrong += [message for _, status, message in outcomes if status == "broken"]
    assert not wrong
    assert asked > 15


def wrong_with(op: Any, dims: Dimensions, *calls: tuple[Any, ...]) -> str:
    """What the law says about a statement, shown by some calls."""
    together = Together()
    shown = Shown(op, dims, together)
    try:
        for args in calls:
            shown.ask(args, {})
    except Broken as wrong:
        return str(wrong)
    return together.wrong() or ""


MATRICES = numbers(3, 3), numbers(3, 3)


@pytest.mark.parametrize(
    ("op", "dims", "args", "said"),
    [
        (aten.mm.default, Equation("mk,nk->mn"), (numbers(2, 3), numbers(3, 4)), "mat2 has size 4 along 'k'"),
        (aten.mm.default, Equation("km,kn->mn"), MATRICES, "'m' is stated batch, and a change at"),
        (aten.mm.default, Equation("MK,Kn->Mn"), MATRICES, "'M' is stated each, but no change"),
        (aten.sum.dim_IntList, Slices("each"), (numbers(2, 3), [1]), "result 0 of shape (2,) is stated to have"),
    ],
)
def test_a_wrong_statement_is_noticed(op: Any, dims: Dimensions, args: tuple[Any, ...], said: str) -> None:
    assert said in wrong_with(op, dims, args)


def test_a_maximum_is_no_reason_to_call_its_dimension_batch() -> None:
    """Along a dimension in which one call shows nothing, another may."""
    together = Together()
    for args in ((numbers(2, 3), 1), (torch.arange(6.0).reshape(2, 3), 1)):
        Shown(aten.cummax.default, Slices("each", positions=(1,)), together).ask(args, {})
    assert together.wrong() is None


def test_the_law_is_one_of_the_verdicts() -> None:
    report = run_operator("softmax", Settings(laws=("dims",), subject="records"))
    assert report.counts["dims"] == {"pass": 1}
    assert not run_operator("equal", Settings(laws=("dims",), subject="records")).asked("dims")
