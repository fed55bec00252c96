"""P5 of operators without a derivative: a rule that has a gradient has that of its own values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import op_registry
from op_registry.authoring import COMPOSITE, REDUCTION, Slices, masked_rule, over_slices

LAWS = ("P2", "P5")


def define(name: str) -> Any:
    """An operator that sums squares, without a derivative."""

    @torch.library.custom_op(f"own_gradients::{name}", mutates_args=())
    def squares(x: Tensor, dim: int) -> Tensor:
        return x.square().sum(dim)

    return getattr(torch.ops.own_gradients, name)


def doubled(v: Tensor) -> Tensor:
    """The same values with twice the gradient."""
    return v.detach() + 2 * (v - v.detach())


def body(name: str, wrong: bool) -> Any:
    op = define(name)

    @over_slices(op, category=REDUCTION, dims=Slices("one"))
    def rule(op: Any, over: Any, x: Any) -> Tensor:
        total: Tensor = over.sum(x.filled(0).square())
        return doubled(total) if wrong else total

    return op


def formula(name: str, wrong: bool) -> Any:
    op = define(name)

    @masked_rule(op, category=COMPOSITE)
    def rule(x: Any, dim: int) -> Any:
        squares = x.square() * 2 - x.square().detach() if wrong else x.square()
        return squares.sum(dim)

    @rule.oracle
    def oracle(x: Any, dim: int) -> Any:
        values = torch.where(x.mask, x.data, 0)
        return type(x)(values.square().sum(dim), x.mask.any(dim))

    return op


@pytest.mark.parametrize("rule", [body, formula])
def test_a_wrong_gradient_breaks_p5(rule: Any) -> None:
    verdict = op_registry.check(rule(f"wrong_{rule.__name__}", True), laws=LAWS)
    assert verdict.of("P2") == "holds"
    assert verdict.of("P5") == "broken"
    assert "central differences give" in str(verdict)


@pytest.mark.parametrize("rule", [body, formula])
def test_a_right_gradient_is_asked(rule: Any) -> None:
    verdict = op_registry.check(rule(f"right_{rule.__name__}", False), laws=LAWS)
    assert verdict.of("P5") == "holds", verdict
    assert bool(verdict), verdict
