"""Bound calls, by hand: arguments by name, and the call that they make."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from op_registry.authoring import ELEMENTWISE, Bound, Dense, masked_rule
from op_registry.registry import registry

aten = torch.ops.aten


def bound(op: Any, *args: Any, **kwargs: Any) -> Bound:
    rule = registry.written(op)
    assert rule is not None
    return Bound.of(rule, op, args, kwargs)


def test_arguments_are_attributes_with_the_defaults_of_the_schema() -> None:
    x = Dense(torch.ones(2, 3))
    call = bound(aten.sum.dim_IntList, x, [1], dtype=torch.float64)
    assert call.self is x
    assert call.first is x
    assert (call.dim, call.keepdim, call.dtype) == ([1], False, torch.float64)
    assert "keepdim" in call
    assert call["keepdim"] is False
    assert call.tensors == {"self": x}
    assert call.labels is not None
    assert call.labels.results[0] == (-2,)


def test_a_call_has_the_arguments_that_differ_from_the_defaults() -> None:
    call = bound(aten.addmm.default, *map(Dense, torch.ones(3, 2, 2)), beta=2)
    assert call.applied(lambda *args, **kwargs: (len(args), kwargs)) == (3, {"beta": 2})
    norm = bound(aten.layer_norm.default, Dense(torch.ones(2, 2)), [2], None, Dense(torch.ones(2)))
    assert norm.applied(lambda *args, **kwargs: (len(args), kwargs)) == (4, {})


def test_an_argument_without_a_default_is_passed_though_it_is_none() -> None:
    call = bound(aten.upsample_nearest1d.vec, Dense(torch.ones(1, 1, 2)), [4], None)
    assert call.applied(lambda *args, **kwargs: (len(args), kwargs)) == (3, {})


def test_changed_arguments_run_by_the_rule() -> None:
    call = bound(aten.sum.dim_IntList, Dense(torch.ones(2, 3), torch.tensor([[1], [0]], dtype=torch.int8)), [1])
    changed = call.with_(keepdim=True)
    assert changed.run().shape == (2, 1)
    assert call.run().shape == (2,)
    assert call.map(lambda r: r.data, Dense).first.shape == (2, 3)


def test_a_name_that_no_argument_has_is_refused_with_those_that_there_are() -> None:
    call = bound(aten.relu.default, Dense(torch.ones(2)))
    with pytest.raises(AttributeError, match=r"the arguments of aten\.relu\.default are self; none is dim"):
        call.dim  # noqa: B018
    with pytest.raises(KeyError, match=r"the arguments of aten\.relu\.default are self; none is dim, keepdim"):
        call.with_(dim=1, keepdim=True)


def test_an_argument_called_as_an_attribute_of_calls_is_an_item() -> None:
    with torch.library._scoped_library("bound_calls", "DEF") as library:
        library.define("shifted(Tensor map, float run) -> Tensor")
        x = Dense(torch.ones(2))
        call = Bound.of(None, torch.ops.bound_calls.shifted.default, (x, 2.0), {})
    assert (call["map"], call["run"]) == (x, 2.0)
    assert call.map(lambda r: 0, Dense)["map"] == 0


def test_a_rule_may_take_the_bound_call() -> None:
    waiting: list[Any] = []

    def keep(rule: Any) -> Any:
        waiting.append(rule)
        return rule

    @masked_rule(aten.celu.default, category=ELEMENTWISE, takes_call=True, register=keep)
    def celu(c: Bound) -> Dense:
        """The operator on the data."""
        return c.self.like(c.with_(self=c.self.data).applied(c.op))

    (rule,) = waiting
    x = Dense(torch.tensor([-1.0, 2.0]), torch.tensor([1, 0], dtype=torch.int8))
    found = rule.bind(aten.celu.default)(x, alpha=2.0)
    assert torch.equal(found.data, aten.celu(x.data, 2.0))
    assert found.validity is x.validity
    assert rule.run.__name__ == "celu"


def test_a_rule_may_get_masked_calls_alone() -> None:
    waiting: list[Any] = []
    masked: list[Dense] = []

    @masked_rule(
        aten.celu.default, category=ELEMENTWISE, torch_if_valid=True, register=lambda r: waiting.append(r) or r
    )
    def celu(x: Dense, alpha: float = 1.0) -> Dense:
        masked.append(x)
        return x.like(aten.celu(x.data, alpha))

    (rule,) = waiting
    data = torch.tensor([-1.0, 2.0])
    plain, partly = Dense(data), Dense(data, torch.tensor([1, 0], dtype=torch.int8))
    for x in (plain, partly):
        found = rule.bind(aten.celu.default)(x, alpha=2.0)
        assert torch.equal(found.data, aten.celu(data, 2.0))
        assert found.validity is x.validity
    assert masked == [partly]
