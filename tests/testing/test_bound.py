"""Bound calls, by hand: arguments by name, and the call that they make."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from op_registry.authoring import Bound, Dense, registry

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


def test_none_is_passed_for_an_optional_tensor_that_has_no_default() -> None:
    call = bound(aten.mse_loss_backward.default, *map(Dense, torch.ones(3, 2)), 1)
    assert len(call.applied(lambda *args: args)) == 4
    library = torch.library.Library("bound_calls", "FRAGMENT")
    library.define("plus(Tensor x, Tensor? y) -> Tensor")
    op = torch.ops.bound_calls.plus.default
    assert Bound(call.rule, op, {"x": 1, "y": None}).applied(lambda *args: args) == (1, None)


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
