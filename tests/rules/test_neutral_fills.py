"""The number that an elementwise rule puts in place of what is invalid: the operator is smooth there.

A gradient of an invalid element is masked, but `detect_anomaly` objects to a NaN before that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch._ops import OpOverload

import masked_dispatch as md
from op_registry import registry
from op_registry.laws.categories import run_elementwise

aten = torch.ops.aten


def operators() -> Iterator[OpOverload]:
    """Elementwise overloads that need nothing but tensors."""
    for op in sorted(registry, key=str):
        rule = registry.get(op)
        needed = {str(a.type) for a in op._schema.arguments if not a.has_default_value()}
        if rule is not None and rule.run is run_elementwise and needed == {"Tensor"}:
            yield op


def operands(op: OpOverload, value: float) -> list[torch.Tensor]:
    number = sum(not a.has_default_value() for a in op._schema.arguments)
    return [torch.full((2,), value, dtype=torch.float64, requires_grad=True) for _ in range(number)]


def is_smooth_at(op: OpOverload, value: float) -> bool | None:
    """Whether value and derivatives are finite there; None where the operator takes no such operands in float64."""
    given = operands(op, value)
    try:
        result = op(*given)
    except RuntimeError:
        return None
    if not isinstance(result, torch.Tensor) or not result.requires_grad or result.is_complex():
        return None
    try:
        first = torch.autograd.grad(result.sum(), given, create_graph=True, allow_unused=True)
    except RuntimeError:  # torch has no derivative
        return None
    found = [result, *(g for g in first if g is not None)]
    twice = [g.sum() for g in first if g is not None and g.requires_grad]
    if twice:
        with contextlib.suppress(RuntimeError):  # no second one
            found += [g for g in torch.autograd.grad(sum(twice), given, allow_unused=True) if g is not None]
    return all(bool(t.isfinite().all()) for t in found)


def test_operators_are_smooth_at_their_neutral_fill() -> None:
    smooth = {op: is_smooth_at(op, float(registry.get(op).traits.neutral)) for op in operators()}
    assert [str(op) for op, answer in smooth.items() if answer is False] == []
    assert sum(answer is True for answer in smooth.values()) > 80
    assert is_smooth_at(aten.acosh.default, 1.0) is False


@pytest.mark.parametrize("hidden", [float("nan"), 7.0, 1.0])
@pytest.mark.parametrize("name", ["acos", "acosh", "asin", "atanh", "erfinv", "logit", "special_ndtri"])
def test_detect_anomaly_has_no_objection(name: str, hidden: float) -> None:
    value = 1.5 if name == "acosh" else 0.25
    plain = torch.tensor([value], requires_grad=True)
    getattr(aten, name)(plain).sum().backward()
    x = md.masked_tensor(torch.tensor([value, hidden]), torch.tensor([True, False]), requires_grad=True)
    with torch.autograd.set_detect_anomaly(True):
        getattr(aten, name)(x).sum().backward()
    assert x.grad.get_mask().tolist() == [True, False]
    assert x.grad[0].item() == plain.grad.item()
