"""Plans of lowerings: made once for a form of call, whatever its sizes and elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from op_registry.authoring import COO, Bound, Dense, NotLowered, Sparse, from_dense, registry
from op_registry.dimensions.labels import Labels
from op_registry.sparse import lowering as plans
from op_registry.sparse.lowering import planned, run_sparsely

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_PLANS", {})


def call(op: Any, *args: Any) -> Bound:
    rule = registry.written(op)
    assert rule is not None
    return Bound.of(rule, op, args, {})


def stored(*sizes: int, sparse_dims: int | None = None) -> Sparse:
    return from_dense(Dense(torch.ones(sizes)), COO, sparse_dims)


def test_a_plan_is_made_once_for_all_sizes() -> None:
    made: list[Labels | None] = []

    @planned
    def plan_of(c: Bound, labels: Labels | None) -> tuple[Labels | None]:
        made.append(labels)
        return (labels,)

    first = plan_of(call(aten.mm.default, stored(2, 3), Dense(torch.ones(3, 4))))
    assert plan_of(call(aten.mm.default, stored(5, 1), Dense(torch.ones(1, 2)))) is first
    assert made[0] is not None
    assert made[0].operands == {"self": ("m", "k"), "mat2": ("k", "n")}
    plan_of(call(aten.mm.default, Dense(torch.ones(2, 3)), stored(3, 4)))
    plan_of(call(aten.mm.default, stored(2, 3, sparse_dims=1), Dense(torch.ones(3, 4))))
    plan_of(call(aten.sum.dim_IntList, stored(2, 3), [0]))
    plan_of(call(aten.sum.dim_IntList, stored(2, 3), [1]))
    plan_of(call(aten.sum.dim_IntList, stored(4, 5), (1,)))
    assert len(made) == 5


def test_a_refusal_is_part_of_a_plan() -> None:
    asked = []

    @planned
    def plan_of(c: Bound, labels: Labels | None) -> Labels:
        asked.append(c)
        raise NotLowered("it is refused")

    for _ in range(2):
        with pytest.raises(NotLowered, match=r"^it is refused$"):
            plan_of(call(aten.mm.default, stored(2, 3), Dense(torch.ones(3, 4))))
    assert len(asked) == 1


def test_labels_that_depend_on_sizes_are_read_each_time() -> None:
    @planned
    def plan_of(c: Bound, labels: Labels | None) -> Labels:
        assert labels is not None
        return labels

    assert plan_of(call(aten.view.default, stored(2, 3), [2, 3])).results == ((-2, -1),)
    assert plan_of(call(aten.view.default, stored(3, 2), [2, 3])).results == (("new0", "new1"),)
    assert not plans._PLANS


def test_plans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_MOST", 3)
    plan_of = planned(lambda c, labels: (labels,))
    for n in range(10):
        plan_of(call(aten.roll.default, stored(2, 3), [n], [0]))
    assert len(plans._PLANS) <= 3


@pytest.mark.parametrize("batch", [4, 1])
def test_calls_of_one_plan_may_differ_in_what_broadcasts(batch: int) -> None:
    x, y = torch.randn(4, 2, 3), torch.randn(batch, 3, 5)
    c = call(aten.matmul.default, from_dense(Dense(x), COO), Dense(y))
    for _ in range(2):
        torch.testing.assert_close(run_sparsely(c.op, c.rule, *c.given).data, x @ y)
        c = call(aten.matmul.default, from_dense(Dense(x[:2]), COO), Dense(y[:2]))
        x, y = x[:2], y[:2]
    with pytest.raises(NotLowered, match=r"its operand `self` of shape \(2, 0, 3\) is empty"):
        run_sparsely(c.op, c.rule, [stored(2, 0, 3), Dense(y)], {})
