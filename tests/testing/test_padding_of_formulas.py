"""P9 of a rule that is a formula: whether padding is the end of a sample is asked of it as of any callable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import op_registry
from op_registry.authoring import COMPOSITE, masked_rule


def define(name: str, formula: Callable[[Any, int], Any], plain: Callable[[Tensor, int], Tensor]) -> Any:
    @torch.library.custom_op(f"padded_formulas::{name}", mutates_args=())
    def operator(x: Tensor, dim: int) -> Tensor:
        return plain(x, dim)

    @operator.register_fake
    def _(x: Tensor, dim: int) -> Tensor:
        return plain(x, dim)

    op = getattr(torch.ops.padded_formulas, name)
    masked_rule(op, category=COMPOSITE)(lambda x, dim: formula(x, dim))
    return op


def mean(x: Tensor, dim: int) -> Tensor:
    return x.sum(dim) / x.shape[dim]


RIGHT: dict[str, Callable[[Any, int], Any]] = {
    "mean": lambda x, dim: x.mean(dim),
    "centred": lambda x, dim: x - x.mean(dim, keepdim=True),
}
WRONG: dict[str, Callable[[Any, int], Any]] = {
    "divided_by_a_size": mean,
    "padding_counts": lambda x, dim: x.to_tensor(0).mean(dim),
}
PLAIN: dict[str, Callable[[Tensor, int], Tensor]] = {"centred": lambda x, dim: x - x.mean(dim, keepdim=True)}


@pytest.mark.parametrize("name", [*RIGHT, *WRONG])
def test_a_formula_is_asked(name: str) -> None:
    op = define(name, (RIGHT | WRONG)[name], PLAIN.get(name, mean))
    verdict = op_registry.check(op, laws=("P9",))
    assert verdict.of("P9") == ("holds" if name in RIGHT else "broken"), verdict
