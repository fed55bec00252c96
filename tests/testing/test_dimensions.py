"""Labels of dimensions, by hand: one statement for each rule, read for each call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from op_registry.authoring import Along, ByArgument, Elementwise, Equation, Slices
from op_registry.bound import bind_by_name
from op_registry.dimensions.movements import AtIndices, Indexed, Moved, Windows
from op_registry.dimensions.slices import LastDims, row_reader
from op_registry.dimensions.views import Cut, Reshaped, View

aten = torch.ops.aten
MATMUL = Equation("*mk,*kn->*mn", "*mk,k->*m", "k,*kn->*n", "k,k->")
LINEAR = Equation("*k,nk,+->*n")
GROUPED = Equation("*(gc)x,(go)ci,(go)->*(go)x", window="x", sizes={"g": "groups"})
NORM = LastDims("normalized_shape", statistics=2)
SLICE = Cut(start="start", stop="end", step="step")


def ones(*ranks: int) -> list[torch.Tensor]:
    return [torch.ones((2,) * rank) for rank in ranks]


# Operator, statement, arguments; labels of each operand, of the first result, and roles. The law "dims" asks of every
# operator whether what is stated holds; these show what the words of a statement are for.
CALLS: list[tuple[Any, Any, list[Any], dict[str, tuple[Any, ...]], tuple[Any, ...], dict[Any, str]]] = [
    (
        aten.matmul.default,
        MATMUL,
        ones(4, 3),
        {"self": (-2, -1, "m", "k"), "other": (-1, "k", "n")},
        (-2, -1, "m", "n"),
        {"k": "contracted"},
    ),
    (aten.sum.dim_IntList, Slices("one"), [*ones(2), [1], True], {"self": (-2, -1)}, (-2, None), {-1: "reduced"}),
    (aten.permute.default, View(), [*ones(3), [2, 0, 1]], {"self": (-3, -2, -1)}, (-1, -3, -2), {}),
    (aten.expand.default, View(), [torch.ones(1, 2), [4, 3, 2]], {"self": (-2, -1)}, (-3, -2, -1), {}),
    (aten.slice.Tensor, SLICE, [*ones(2), 1, 0, 1], {"self": (-2, -1)}, (-2, -1), {-1: "selected"}),
    (aten.slice.Tensor, SLICE, [*ones(2), 1, 0, 2], {"self": (-2, -1)}, (-2, -1), {}),  # all of it
    (aten.view.default, Reshaped(), [torch.ones(2, 3, 4), [6, 4]], {"self": (-3, -2, -1)}, ((-3, -2), -1), {}),
    (
        aten.view.default,
        Reshaped(),
        [torch.ones(6, 4), [2, -1, 4]],
        {"self": (("-2.0", "-2.1"), -1)},
        ("-2.0", "-2.1", -1),
        {},
    ),
    (
        aten.conv1d.default,
        GROUPED,
        [torch.ones(2, 6, 5), torch.ones(4, 3, 2), None, [1], [0], [1], 2],
        {"input": (-1, ("g", "c"), "x"), "weight": (("g", "o"), "c", "i")},
        (-1, ("g", "o"), "x"),
        {"x": "window", "i": "contracted", "c": "contracted"},
    ),
    (
        aten.index.Tensor,
        AtIndices(),
        [*ones(3), [torch.tensor([0, 1]), None, torch.tensor([1])]],
        {"self": (-3, -2, -1), "indices[0]": ("position-1",), "indices[2]": ("position-1",)},
        ("position-1", -2),
        {-3: "indexed", -1: "indexed"},
    ),
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
        (aten.conv1d.default, GROUPED, ones(3, 3), 0),  # windows may lie in zeros around the row
    ],
)
def test_rows(op: Any, dims: Any, args: list[Any], row: int) -> None:
    first, *rest = [a.ndim if isinstance(a, torch.Tensor) else tuple(a) if isinstance(a, list) else a for a in args]
    assert row_reader(op, dims)(first, first, *rest) == row


def test_rows_that_are_listed_are_those_of_the_tensor_that_is_shown() -> None:
    assert row_reader(aten.linear.default, LINEAR)(3, 2, 2) == 1
    product = Equation("mk,kn->mn")  # of matrices, and not of batches
    assert row_reader(aten.mm.default, product)(2, 2, 2) == 1
    assert row_reader(aten.mm.default, product)(3, 2, 2) == 0


def test_a_parameter_and_a_list_have_one_term_each() -> None:
    """What a recurrent network makes of its steps, states and parameters."""
    lstm = Equation("t*i,L*K,?->t*O,L*H,L*C", scanned="t")
    args = [torch.ones(5, 2, 3), [torch.ones(1, 2, 4)] * 2, [torch.ones(16, 3)], False, 1, 0.0, False, False, False]
    labels = lstm.labels(aten.lstm.input, bind_by_name(aten.lstm.input, args, {}))
    assert labels is not None
    assert labels.operands == {
        "input": ("t", -1, "i"),
        "hx[0]": ("L", -1, "K"),
        "hx[1]": ("L", -1, "K"),
        "params[0]": ("params[0].0", "params[0].1"),
    }
    assert labels.results == (("t", -1, "O"), ("L", -1, "H"), ("L", -1, "C"))
    assert {a: labels.roles[a] for a in ("t", "i", "L", "params[0].0")} == {
        "t": "scanned",
        "i": "contracted",
        "L": "each",
        "params[0].0": "parameter",
    }


def test_sizes_choose_among_equations_of_one_rank() -> None:
    solve = Equation("bMN,bN->bM", "*MN,*Nk->*Mk")
    for shape, result in (((2, 3), ("b", "M")), ((3, 4), (-1, "M", "k"))):
        args = [torch.ones(2, 3, 3), torch.ones(shape)]
        labels = solve.labels(aten.linalg_solve.default, bind_by_name(aten.linalg_solve.default, args, {}))
        assert labels is not None
        assert labels.results == (result,)


def test_the_sizes_of_parts_are_arguments() -> None:
    args = [torch.ones(2, 6, 5), torch.ones(4, 3, 2), None, [1], [0], [1], 2]
    labels = GROUPED.labels(aten.conv1d.default, bind_by_name(aten.conv1d.default, args, {}))
    assert labels is not None
    assert labels.sizes == {"g": 2}


@pytest.mark.parametrize(
    ("op", "dims", "arguments", "parts"),
    [
        (aten.slice.Tensor, SLICE, [1, 1, -1], ["x[:, 1:-1]"]),
        (aten.slice.Tensor, SLICE, [-1, None, 4, 2], ["x[:, :, :, :4:2]"]),
        (aten.narrow_copy.default, Cut(start="start", length="length"), [1, -2, 2], ["x[:, -2:]"]),
        (aten.select.int, Cut(index="index"), [0, -1], ["x[-1]"]),
        (aten.unbind.int, Cut(), [0], ["x[0]", "x[1]"]),
        (aten.split.Tensor, Cut(sizes="split_size"), [3, 1], ["x[:, :3]", "x[:, 3:5]"]),
        (aten.split_with_sizes.default, Cut(sizes="split_sizes"), [[1, 4], 1], ["x[:, :1]", "x[:, 1:5]"]),
        (aten.squeeze.dims, View(), [[2, 3]], ["x[:, :, :, 0]"]),
    ],
)
def test_the_parts_that_results_show(op: Any, dims: Any, arguments: list[Any], parts: list[str]) -> None:
    labels = dims.labels(op, bind_by_name(op, [torch.ones(2, 5, 3, 1), *arguments], {}))
    assert labels is not None
    assert [part.written(labels.operands["self"].index(part.label)) for (part,) in labels.cuts] == parts


def test_how_elements_change_places() -> None:
    x = torch.ones(2, 3)
    flipped = Moved().labels(aten.flip.default, bind_by_name(aten.flip.default, [x, [0, 1]], {}))
    rolled = Moved(by="shifts").labels(aten.roll.default, bind_by_name(aten.roll.default, [x, [2], [-1]], {}))
    assert flipped is not None
    assert rolled is not None
    assert flipped.moves == ((-2, None), (-1, None))
    assert rolled.moves == ((-1, 2),)


def test_what_an_argument_counts() -> None:
    x, target = torch.ones(2, 3), torch.zeros(2, dtype=torch.int64)
    loss = Equation("nc,n,c->n", counts={"target": "c"})
    counted = loss.labels(aten.multi_margin_loss.default, {"self": x, "target": target, "weight": None})
    gathered = Indexed(aligned=True).labels(aten.gather.default, {"self": target, "dim": 0, "index": target})
    assert counted is not None
    assert gathered is not None
    assert (counted.counts, gathered.counts) == ({"target": ("c",)}, {"index": (-1,)})


@pytest.mark.parametrize(
    ("dims", "said"),
    [
        (Cut(start="frist"), "Cut(start='frist'): the operator has no dim and frist; its arguments are self"),
        (Moved(by="shifts"), "Moved(by='shifts'): the operator has no dims and shifts; its arguments are self"),
        (Windows(), "Windows(): aten.add.Tensor does not say of how many dimensions"),
        (Windows("pad"), "Windows('pad'): the operator has no pad; its arguments are self, other, alpha"),
        (Indexed(), "Indexed(): the operator has no dim and index; its arguments"),
        (AtIndices(), "AtIndices(): the operator has no indices; its arguments are self, other, alpha"),
        (Along("moved"), "Along('moved'): the operator has no dim; its arguments are self"),
        (Reshaped(), "Reshaped(): the operator has no size; its arguments are self, other, alpha"),
        (
            ByArgument("left", Elementwise(), Elementwise()),
            "ByArgument('left', true=Elementwise(), false=Elementwise()): the operator has no left",
        ),
        (Equation("mk->m"), "'mk->m' has 1 operands, and the operator's tensors are self, other"),
    ],
)
def test_an_operator_without_the_arguments_is_a_misfit(dims: Any, said: str) -> None:
    assert said in str(dims.misfit(aten.add.Tensor))


@pytest.mark.parametrize(
    ("equations", "said"),
    [
        (("mk,kn",), "'mk,kn' is no equation such as"),
        (("mk,kn->mx",), "no operand has x"),
        (("m(k,kn->mn",), "is no equation"),
        (("mk,kn->+",), "is no equation"),
        ((), "an equation is needed"),
    ],
)
def test_what_is_no_equation_is_refused(equations: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("*", r"\*").replace("+", r"\+")):
        Equation(*equations)
