"""Labels of dimensions, by hand: one statement for each rule, read for each call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from op_registry.authoring import Elementwise, Equation, LastDims, Slices
from op_registry.bound import bind_by_name
from op_registry.dimensions import row_reader

aten = torch.ops.aten
MATMUL = Equation("*mk,*kn->*mn", "*mk,k->*m", "k,*kn->*n", "k,k->")
LINEAR = Equation("*k,nk,+->*n")
NORM = LastDims("normalized_shape", statistics=2)


def ones(*ranks: int) -> list[torch.Tensor]:
    return [torch.ones((2,) * rank) for rank in ranks]


# Operator, statement, arguments; labels of each operand, of the first result, and roles.
CALLS: list[tuple[Any, Any, list[Any], dict[str, tuple[Any, ...]], tuple[Any, ...], dict[Any, str]]] = [
    (
        aten.mm.default,
        Equation("mk,kn->mn"),
        ones(2, 2),
        {"self": ("m", "k"), "mat2": ("k", "n")},
        ("m", "n"),
        {"k": "contracted"},
    ),
    (
        aten.matmul.default,
        MATMUL,
        ones(4, 3),
        {"self": (-2, -1, "m", "k"), "other": (-1, "k", "n")},
        (-2, -1, "m", "n"),
        {"k": "contracted"},
    ),
    (
        aten.matmul.default,
        MATMUL,
        ones(3, 1),
        {"self": (-1, "m", "k"), "other": ("k",)},
        (-1, "m"),
        {"k": "contracted"},
    ),
    (
        aten.linear.default,
        LINEAR,
        ones(3, 2, 1),
        {"input": (-2, -1, "k"), "weight": ("n", "k"), "bias": ("n",)},
        (-2, -1, "n"),
        {"k": "contracted"},
    ),
    (aten.linear.default, LINEAR, ones(1, 2), {"input": ("k",), "weight": ("n", "k")}, ("n",), {"k": "contracted"}),
    (
        aten.sum.dim_IntList,
        Slices("one"),
        [*ones(3), [-1, 0]],
        {"self": (-3, -2, -1)},
        (-2,),
        {-1: "reduced", -3: "reduced"},
    ),
    (aten.sum.dim_IntList, Slices("one"), [*ones(2), [1], True], {"self": (-2, -1)}, (-2, None), {-1: "reduced"}),
    (aten.sum.default, Slices("one"), ones(2), {"self": (-2, -1)}, (), {-1: "reduced", -2: "reduced"}),
    (aten.softmax.int, Slices("each"), [*ones(2), 0], {"self": (-2, -1)}, (-2, -1), {-2: "each"}),
    (
        aten.native_layer_norm.default,
        NORM,
        [*ones(3), [2, 2], *ones(2, 2), 1e-5],
        {"input": (-3, -2, -1), "weight": (-2, -1), "bias": (-2, -1)},
        (-3, -2, -1),
        {-2: "each", -1: "each"},
    ),
    (aten.add.Tensor, Elementwise(), ones(3, 2), {"self": (-3, -2, -1), "other": (-2, -1)}, (-3, -2, -1), {}),
]


@pytest.mark.parametrize(("op", "dims", "args", "operands", "result", "roles"), CALLS)
def test_labels(op: Any, dims: Any, args: Any, operands: Any, result: Any, roles: Any) -> None:
    labels = dims.labels(op, bind_by_name(op, args, {}))
    assert labels is not None
    assert dict(labels.operands) == operands
    assert labels.results[0] == result
    assert dict(labels.roles) == roles


def test_statistics_are_one_for_each_slice() -> None:
    args = [*ones(3), [2], None, None, 1e-5]
    labels = NORM.labels(aten.native_layer_norm.default, bind_by_name(aten.native_layer_norm.default, args, {}))
    assert labels is not None
    assert labels.results == ((-3, -2, -1), (-3, -2, None), (-3, -2, None))


def test_a_call_of_other_ranks_has_no_labels() -> None:
    args = ones(3, 3)
    assert Equation("mk,kn->mn").labels(aten.mm.default, bind_by_name(aten.mm.default, args, {})) is None


@pytest.mark.parametrize(
    ("op", "dims", "args", "row"),
    [
        (aten.matmul.default, MATMUL, ones(3, 2), 1),
        (aten.matmul.default, MATMUL, ones(3, 3), 0),  # each index of the first dimension has its own matrix
        (aten.matmul.default, MATMUL, ones(3, 1), 0),  # the result has no dimension in place of the row
        (aten.matmul.default, MATMUL, ones(1, 2), 0),  # there is nothing but one row
        (aten.linear.default, LINEAR, ones(3, 2, 1), 1),
        (aten.linear.default, LINEAR, ones(3, 2, 2), 2),  # each row has a number of its own added
        (aten.softmax.int, Slices("each"), [*ones(3), -1], 1),
        (aten.softmax.int, Slices("each"), [*ones(3), 2], 0),  # counted from the front
        (aten.layer_norm.default, NORM, [*ones(3), [2, 2], *ones(2, 2)], 2),
    ],
)
def test_rows(op: Any, dims: Any, args: list[Any], row: int) -> None:
    assert row_reader(op, dims)(*args) == row


@pytest.mark.parametrize(
    ("equations", "said"),
    [
        (("mk,kn",), "'mk,kn' is no equation such as"),
        (("mk,kn->mx",), "no operand has x"),
        (("m*k,kn->mn",), "is no equation"),
        (("mk,kn->+",), "is no equation"),
        ((), "an equation is needed"),
    ],
)
def test_what_is_no_equation_is_refused(equations: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("*", r"\*").replace("+", r"\+")):
        Equation(*equations)
