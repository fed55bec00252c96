"""A contraction whose rule states another equation than its operator computes is noticed; the right one holds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import op_registry
from op_registry.authoring import Equation, contraction, registry

library = torch.library.Library("equations", "DEF")
library.define("gram(Tensor x, Tensor y) -> Tensor")
library.define("three(Tensor x, Tensor y, Tensor z) -> Tensor")
library.define("affine(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
library.define("twice(Tensor x, Tensor y) -> Tensor")
library.impl("gram", lambda x, y: torch.einsum("bmk,bmn->bkn", x, y), "CompositeExplicitAutograd")
library.impl("three", lambda x, y, z: torch.einsum("mk,kn,n->mn", x, y, z), "CompositeExplicitAutograd")
library.impl("affine", lambda x, weight, bias: torch.nn.functional.linear(x, weight, bias), "CompositeExplicitAutograd")
library.impl("twice", lambda x, y: 2 * (x @ y), "CompositeExplicitAutograd")
ops = torch.ops.equations

Shapes = list[tuple[tuple[int, ...] | None, ...]]
RIGHT: dict[str, tuple[Any, str, Shapes]] = {
    "gram": (ops.gram, "bmk,bmn->bkn", [((2, 3, 4), (2, 3, 2))]),
    "three factors": (ops.three, "mk,kn,n->mn", [((3, 4), (4, 2), (2,))]),
    "affine": (ops.affine, "*k,nk,+->*n", [((3, 4), (2, 4), (2,)), ((2, 3, 4), (2, 4), None)]),
}
WRONG: dict[str, tuple[Any, str, Shapes, str]] = {
    "another letter contracted": (ops.gram, "bmk,bnk->bmn", [((2, 3, 3), (2, 3, 3))], "values differ"),
    "batch taken for contracted": (ops.gram, "bmk,bmn->kn", [((2, 3, 4), (2, 3, 2))], "its result has shape"),
    "contracted taken for batch": (ops.gram, "bmk,bmn->mkn", [((3, 3, 3), (3, 3, 3))], "values differ"),
    "an operand left out": (ops.affine, "*k,nk,+->*k", [((2, 2, 2), (2, 2), (2,))], "values differ"),
    "a factor taken for added": (ops.three, "mk,kn,+->mn", [((3, 4), (4, 2), (2,))], "values differ"),
    "a coefficient": (ops.twice, "mk,kn->mn", [((3, 4), (4, 2))], "values differ"),
    "other sizes": (ops.gram, "bmk,bnm->bkn", [((2, 3, 4), (2, 3, 2))], "dimensions of sizes"),
    "other ranks": (ops.gram, "mk,mn->kn", [((2, 3, 4), (2, 3, 2))], r"operands of \[3, 3\] dimensions"),
}


def verdict_of(op: Any, equation: str, shapes: Shapes, laws: tuple[str, ...]) -> Any:
    with registry.overlay():
        rule = contraction(op, dims=Equation(equation))

        @rule.samples
        def of_shapes(make: Any) -> Iterator[tuple[Any, ...]]:
            for sizes in shapes:
                yield tuple(None if size is None else make(size) for size in sizes)

        return op_registry.check(op, laws=laws)


@pytest.mark.parametrize(("op", "equation", "shapes"), RIGHT.values(), ids=RIGHT)
def test_the_equation_of_an_operator_serves_it_in_every_storage(op: Any, equation: str, shapes: Shapes) -> None:
    verdict = verdict_of(op, equation, shapes, ("P1", "P2", "P3", "P4", "P5"))
    assert verdict, str(verdict)


@pytest.mark.parametrize(("op", "equation", "shapes", "said"), WRONG.values(), ids=WRONG)
def test_another_equation_is_noticed(op: Any, equation: str, shapes: Shapes, said: str) -> None:
    verdict = verdict_of(op, equation, shapes, ("P2",))
    assert not verdict
    assert re.search(said, str(verdict)), str(verdict)
