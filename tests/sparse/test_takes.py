"""What lowerings state of the calls that they take: arguments that exist, and the text of each refusal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from op_registry.authoring import COO, PACKED, Bound, Dense, Permuted, Rule, Sparse, from_dense, registry
from op_registry.sparse.lowering import FirstOf, OnCall, Takes, listed

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
