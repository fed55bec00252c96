"""Operators of another library whose rules state their dimensions: every law holds in every storage, none is dense."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from op_registry.authoring import NORMALIZATION, Dense, Equation, Rule, Slices, contraction, over_slices, reduction
from op_registry.conformance.own_operators import RegisteredOperator
from op_registry.conformance.trials import STORAGES, Settings, run_operator
from op_registry.conformance.verdict import Verdict
from op_registry.dimensions.slices import LastDims
from op_registry.records.slices import Over

pytestmark = pytest.mark.usefixtures("rules_forgotten")

ops = torch.ops.strangers


def defined(function: Callable[..., Tensor]) -> None:
    """A custom operator that computes `function` and has its derivative."""

    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        with torch.enable_grad():
            tensors = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            grads = torch.autograd.grad(function(*tensors, *ctx.rest), tensors, grad)
        return *grads, *[None] * len(ctx.rest)

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*[i for i in inputs if isinstance(i, Tensor)])
        ctx.rest = [i for i in inputs if not isinstance(i, Tensor)]

    operator = torch.library.custom_op(f"strangers::{function.__name__}", function, mutates_args=())
    operator.register_fake(lambda *args: torch.empty_like(function(*args)))
    operator.register_autograd(backward, setup_context=save)


@defined
def pair_scores(x: Tensor, table: Tensor) -> Tensor:
    return x @ table.T


@defined
def energy(x: Tensor, axis: int) -> Tensor:
    return x.square().sum(axis)


@defined
def unit_scale(x: Tensor, axis: int) -> Tensor:
    return x / (1 + x.square().mean(axis, keepdim=True))


@defined
def scaled_rows(x: Tensor, gain: Tensor) -> Tensor:
    return gain * x / (1 + x.square().mean(-1, keepdim=True))


def divided_by_mean_square(op: Any, over: Over, x: Dense, gain: Dense | None = None) -> Tensor:
    mean = over.sum(x.filled(0).square()) / over.count(x).clamp(min=1)
    result = x.filled(0) / (1 + over.broadcast_to_elements(mean))
    return result if gain is None else Dense(result, x.validity).filled(0) * gain.filled(0)


RULES: dict[str, Callable[[], Rule]] = {
    "pair_scores": lambda: contraction(ops.pair_scores, dims=Equation("*k,nk->*n")),
    "energy": lambda: reduction(ops.energy, identity=0, dims=Slices(dim="axis")),
    "unit_scale": lambda: over_slices(ops.unit_scale, category=NORMALIZATION, dims=Slices("each", dim="axis"))(
        divided_by_mean_square
    ),
    "scaled_rows": lambda: over_slices(ops.scaled_rows, category=NORMALIZATION, dims=LastDims(1))(
        divided_by_mean_square
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_every_law_holds_in_every_storage(name: str) -> None:
    rule = RULES[name]()
    settings = Settings(most=2, most_stored=2, also_stored=STORAGES)
    report = run_operator(RegisteredOperator(rule.ops[0]), settings)
    verdict = Verdict((report,))
    assert verdict, str(verdict)
    decisions = {answer.law: answer.decision for answer in verdict.answers}
    assert decisions == dict.fromkeys(("P1", "P2", "P3", "P4", "P5", "P7", "P8", "P9", "dims", "later"), "holds") | {
        "P6": "does not apply"
    }
    # Stored densely is a sparse parameter of dense rows alone.
    parameter_alone = {"strangers.scaled_rows.default: only the first operand may be sparse"}
    assert set(report.reasons) == (parameter_alone if name == "scaled_rows" else set())


@pytest.mark.parametrize(
    ("register", "said"),
    [
        (lambda: contraction(ops.pair_scores, dims=Equation("k,nk,n->n")), "has 3 operands, and the operator's"),
        (lambda: reduction(ops.energy, identity=0), "If axis says which they are, add dims=Slices(dim='axis')"),
        (lambda: over_slices(ops.scaled_rows, category=NORMALIZATION, dims=LastDims("shape")), "LastDims('shape')"),
    ],
)
def test_what_no_call_can_be_is_refused(register: Callable[[], Any], said: str) -> None:
    with pytest.raises(TypeError) as refusal:
        register()
    assert said in str(refusal.value)


def test_a_wrong_equation_is_noticed() -> None:
    """Torch runs no sample that is made by it. Others are tried, and the oracle says that it does not fit them."""
    rule = contraction(ops.pair_scores, dims=Equation("*k,kn->*n"))
    verdict = Verdict((run_operator(RegisteredOperator(rule.ops[0]), Settings(most=1, laws=("P2",))),))
    assert verdict.of("P2") == "broken"
    assert "not '*k,kn->*n'" in str(verdict)
