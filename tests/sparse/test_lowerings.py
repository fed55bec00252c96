"""Lowerings: what they state of the calls that they take, why they do not take one, and plans, made once for a form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from op_registry.authoring import Bound, Dense, NotLowered, Permuted, Rule, Sparse
from op_registry.dimensions.labels import Labels
from op_registry.registry import registry
from op_registry.sparse import lowering as plans
from op_registry.sparse.convert import from_dense
from op_registry.sparse.layout import COO, PACKED
from op_registry.sparse.lowering import FirstOf, OnCall, Takes, listed, planned, run_sparsely

aten = torch.ops.aten


def calls_in(lowering: Any) -> Iterator[OnCall]:
    if isinstance(lowering, FirstOf):
        for alternative in lowering.alternatives:
            yield from calls_in(alternative)
    elif isinstance(lowering, OnCall):
        yield lowering


def names_in(takes: Takes) -> set[str]:
    texts = [value for f in fields(takes) if isinstance(value := getattr(takes, f.name), str)]
    return {name for text in texts for name in listed(text)} | {name for name, _ in takes.only}


def unknown_names(rules: Iterable[Rule]) -> dict[str, set[str]]:
    """Names that lowerings state, and that no overload of the rules that share the lowering has."""
    arguments: dict[OnCall, set[str]] = {}
    for rule in rules:
        for lowering in rule.lowerings.values():
            for on_call in calls_in(lowering):
                arguments.setdefault(on_call, set()).update(a.name for op in rule.ops for a in op._schema.arguments)
    found = {str(call.run): names_in(call.takes) - known for call, known in arguments.items()}
    return {run: unknown for run, unknown in found.items() if unknown}


def test_every_name_that_a_lowering_states_is_an_argument() -> None:
    assert unknown_names(registry.rules()) == {}


def test_a_misspelt_name_is_found() -> None:
    rule = registry.written(aten.index_select.default)
    assert rule is not None
    misspelt = Takes(sparse="self", dense="indeks", only=(("dims", 0),))
    lowered = FirstOf((OnCall(str, Takes(sparse="self")), OnCall(str, misspelt)))
    copy = Rule(rule.ops, rule.category, rule.run, rule.takes_op, rule.where, lowerings={Sparse: lowered})
    assert unknown_names([copy]) == {"<class 'str'>": {"indeks", "dims"}}


X = Dense(torch.arange(6.0).reshape(2, 3), torch.tensor([[1, 0, 1], [0, 0, 0]], dtype=torch.int8))
STORED = from_dense(X, COO)
HYBRID = from_dense(X, COO, 1)
STEPS = torch.tensor([[1, 1, 0], [1, 0, 0]], dtype=torch.int8)
PACKED_ROWS = from_dense(Dense(torch.ones(2, 3, 4), STEPS.unsqueeze(-1)), PACKED)
EMPTY = Dense(torch.ones(0, 3))
HALF = Dense(torch.ones(2, 3, dtype=torch.float16))


@pytest.mark.parametrize(
    ("stated", "arguments", "reason"),
    [
        ({"sparse": "self"}, (X, STORED), "`self` is stored densely"),
        ({"sparse": "self"}, (Permuted(HYBRID, (1, 0)), X), "`self` has dense dimensions before sparse ones"),
        ({"dense": "self, other"}, (X, STORED), "`other` is stored sparsely"),
        ({"dense": "self, other"}, (X, Permuted(HYBRID, (1, 0))), "`other` is stored sparsely"),
        ({"packed": "self, other"}, (PACKED_ROWS, STORED), "`other` is no packed batch"),
        ({"packed": "self, other"}, (Permuted(PACKED_ROWS, (1, 0, 2)), X), "`other` is no packed batch"),
        ({"no_dense_dims": "self, other"}, (STORED, HYBRID), "`other` has dense dimensions"),
        (
            {"one_dtype": "self, other"},
            (STORED, HALF),
            "its operands have different dtypes: `self` has torch.float32 and `other` has torch.float16",
        ),
        (
            {"one_ndim": "self, other"},
            (STORED, PACKED_ROWS),
            "its operands have different numbers of dimensions: `self` has 2 and `other` has 3",
        ),
        ({"floats": "self, other"}, (STORED, HALF), "it computes `other`, of torch.float16, in another dtype"),
        ({"only": (("alpha", 1),)}, (STORED, X, 2), "alpha=2, and only alpha=1 is written for sparse storage"),
        ({"elements": True}, (STORED, EMPTY), "an operand of shape (0, 3) has no elements"),
        (
            {
                "sparse": "self",
                "dense": "other",
                "one_ndim": "self, other",
                "one_dtype": "self, other",
                "floats": "self",
                "only": (("alpha", 1), ("beta", 0)),
                "eager": True,
                "elements": True,
            },
            (STORED, X),
            None,
        ),
        ({"packed": "self, other"}, (PACKED_ROWS, Permuted(PACKED_ROWS, (1, 0, 2))), None),
        ({}, (X, STORED), None),
    ],
)
def test_why_a_call_is_not_taken(stated: dict[str, Any], arguments: tuple[Any, ...], reason: str | None) -> None:
    assert Takes(**stated).misfit(call_of_add(*arguments)) == reason


def call_of_add(self: Any, other: Any, alpha: int = 1) -> Bound:
    rule = registry.written(aten.add.Tensor)
    assert rule is not None
    return Bound.of(rule, aten.add.Tensor, (self, other), {"alpha": alpha})


def test_what_depends_on_numbers_is_not_taken_while_tracing() -> None:
    with FakeTensorMode() as mode:
        traced = Dense(mode.from_tensor(X.data))
        reason = Takes(eager=True).misfit(call_of_add(traced, traced))
    assert reason == "its result has as many elements as the numbers say, which are unknown while tracing"


def test_floats_are_not_taken_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        reason = Takes(floats="self").misfit(call_of_add(STORED, X))
    assert reason == "it computes `self`, of torch.float32, in another dtype"


def test_optional_arguments_that_are_not_given_fit() -> None:
    rule = registry.written(aten.linear.default)
    assert rule is not None
    call = Bound.of(rule, aten.linear.default, (STORED, X), {})
    assert Takes(dense="weight, bias", one_dtype="input, weight, bias", floats="bias").misfit(call) is None


def test_every_record_of_a_list_has_to_fit() -> None:
    rule = registry.written(aten.cat.default)
    assert rule is not None
    call = Bound.of(rule, aten.cat.default, ([STORED, X],), {})
    assert Takes(sparse="tensors").misfit(call) == "`tensors` is stored densely"
    assert Takes(dense="tensors").misfit(call) == "`tensors` is stored sparsely"
    assert Takes(no_dense_dims="tensors").misfit(call) is None


# -------------------------------------------------------------------------------------------------------------- plans


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
