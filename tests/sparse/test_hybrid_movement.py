"""Hybrid and packed storage: movements along dense dimensions and those that mix with sparse ones; positions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
import op_registry
from masked_dispatch import MaskedTensor, masked_tensor
from op_registry.authoring import REDUCTION, Slices, lowest, masked_rule, reduction, scan

LENGTHS = torch.tensor([3, 5, 1, 0])
STEPS = (torch.arange(5) < LENGTHS[:, None])[..., None].expand(4, 5, 6)


def steps(*sizes: int) -> MaskedTensor:
    """Four sequences of up to five steps."""
    return masked_tensor(torch.arange(120.0).reshape(4, 5, 6), STEPS).reshape(4, 5, *sizes)


STORED = {
    "hybrid": lambda: steps(6).to_sparse(2),
    "one sparse dimension": lambda: steps(6).to_sparse(1),
    "packed": lambda: steps(6).to_packed().without_extent(),
}
MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "diagonal of sparse dimensions": lambda x: x.diagonal(1, 0, 1),
    "diagonal of a sparse and a dense one": lambda x: x.diagonal(-1, 0, 2),
    "diagonal of dense ones": lambda x: x.diagonal(0, 2, 1),
    "roll of all elements": lambda x: x.roll(7),
    "roll of sparse and dense dimensions": lambda x: x.roll((1, 2, -1), (0, 2, 2)),
    "repeat": lambda x: x.repeat(2, 1, 2, 3),
    "repeat no times": lambda x: x.repeat(2, 0, 1),
    "windows along a sparse dimension": lambda x: x.unfold(1, 2, 2),
    "windows along a dense dimension": lambda x: x.unfold(2, 3, 2),
    "view that mixes dimensions": lambda x: x.reshape(2, 60),
    "view that divides a dense dimension": lambda x: x.reshape(20, 2, 3),
    "flatten": lambda x: x.flatten(),
    "concatenation with fewer sparse dimensions": lambda x: torch.cat([x, steps(6).to_sparse()], 1),
    "choice among other sparse dimensions": lambda x: torch.where(torch.arange(6) > 2, x, steps(6).to_sparse()),
}


def assert_as_stored_densely(move: Callable[[Tensor], Tensor], stored: Tensor) -> None:
    expected = move(stored.to_dense())
    with md.densify("never"):
        result = move(stored)
    md.testing.assert_close(result.to_dense(), expected.to_dense())


@pytest.mark.parametrize("storage", STORED)
@pytest.mark.parametrize("move", MOVES)
def test_movements_of_hybrid_storage(move: str, storage: str) -> None:
    assert_as_stored_densely(MOVES[move], STORED[storage]())


@pytest.mark.parametrize(
    "move",
    [
        lambda x: x.expand(2, 4, 2, 5, 3),
        lambda x: x[:1].squeeze(0),
        lambda x: x.roll(1, -1),
        lambda x: x.unfold(-1, 2, 1),
        lambda x: torch.stack([x, x], 2),
    ],
)
def test_movements_of_permuted_records(move: Callable[[Tensor], Tensor]) -> None:
    assert_as_stored_densely(move, steps(2, 3).to_packed().transpose(1, 2))


def test_glu_along_the_last_dimension_of_heads() -> None:
    assert_as_stored_densely(lambda x: torch.nn.functional.glu(x), steps(3, 2).to_packed().transpose(1, 2))


def test_a_tensor_without_elements_is_viewed() -> None:
    nothing = masked_tensor(torch.ones(0, 4), torch.ones(0, 4, dtype=torch.bool)).to_sparse()
    assert_as_stored_densely(lambda x: x.view(0, 2, 2), nothing)
    assert_as_stored_densely(lambda x: x.view(4, 0), nothing)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: x.roll((1, 2), (0,)), "shifts and dimensions must align"),
        (lambda x: x.repeat(2), "Number of dimensions of repeat dims"),
        (lambda x: torch.stack([x, x[:2]]), "stack expects each tensor to be equal size"),
        (lambda x: torch.cat([x, x[:, :2]]), "Sizes of tensors must match except in dimension 0"),
        (lambda x: torch.cat([x, x[0]]), "Number of dimensions of tensors must match"),
    ],
)
def test_the_errors_of_torch(call: Callable[[Tensor], Tensor], text: str) -> None:
    with md.densify("never"), pytest.raises(RuntimeError, match=text):
        call(steps(6).to_sparse(2))


def test_a_loss_over_classes_of_a_transposed_matrix() -> None:
    """Its classes are stored sparsely, although it has as many of them as samples."""
    mask = torch.tensor([[True], [False], [True]]).expand(3, 3)
    matrix = masked_tensor(torch.arange(9.0).reshape(3, 3).log_softmax(1), mask)
    target = torch.tensor([1, 0, 1])
    expected = torch.nn.functional.nll_loss(matrix.t(), target, reduction="none")
    stored = torch.nn.functional.nll_loss(matrix.to_sparse(1).t(), target, reduction="none")
    md.testing.assert_close(stored.to_dense(), expected)


# ----------------------------------------------------------- results of other libraries that are positions in a slice


nan = math.nan


def found(chosen: Tensor, dim: int, none: int) -> Tensor:
    """The first True along `dim`, `none` where there is none."""
    return torch.where(chosen.any(dim), chosen.to(torch.int8).argmax(dim), none)


@torch.library.custom_op("positions::greatest", mutates_args=())
def greatest(x: Tensor, dim: int) -> Tensor:
    return x.argmax(dim)


@torch.library.custom_op("positions::first_above", mutates_args=())
def first_above(x: Tensor, dim: int) -> Tensor:
    """The first element above 4; the size of the slice if there is none."""
    return found(x > 4, dim, x.shape[dim])


@torch.library.custom_op("positions::first_above_or_minus_one", mutates_args=())
def first_above_or_minus_one(x: Tensor, dim: int) -> Tensor:
    return found(x > 4, dim, -1).to(torch.int32)


@torch.library.custom_op("positions::value_and_place", mutates_args=())
def value_and_place(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return tuple(t.clone() for t in x.max(dim))  # type: ignore[return-value]


@torch.library.custom_op("positions::in_all", mutates_args=())
def in_all(x: Tensor) -> Tensor:
    return x.argmax()


@torch.library.custom_op("positions::first_in_all", mutates_args=())
def first_in_all(x: Tensor) -> Tensor:
    return found(x.flatten() > 400, 0, x.numel())


@torch.library.custom_op("positions::greatest_so_far", mutates_args=())
def greatest_so_far(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return tuple(t.clone() for t in x.cummax(dim))  # type: ignore[return-value]


@torch.library.custom_op("positions::how_many_above", mutates_args=())
def how_many_above(x: Tensor, dim: int) -> Tensor:
    return (x > 4).sum(dim)


@torch.library.custom_op("positions::unsaid", mutates_args=())
def unsaid(x: Tensor, dim: int) -> Tensor:
    return x.argmax(dim)


@torch.library.custom_op("positions::unsaid_by_hand", mutates_args=())
def unsaid_by_hand(x: Tensor, dim: int) -> Tensor:
    return x.argmax(dim)


OPS: Any = torch.ops.positions
for _name in ("greatest", "first_above", "first_above_or_minus_one"):
    reduction(getattr(OPS, _name), identity=lowest, dims=Slices(positions=(0,)))
reduction(OPS.value_and_place, identity=lowest, dims=Slices(positions=(1,)))
for _name in ("in_all", "first_in_all"):
    reduction(getattr(OPS, _name), identity=lowest, dims=Slices(dim=None, positions=(0,)))
scan(OPS.greatest_so_far, identity=lowest, dims=Slices("each", positions=(1,)))
reduction(OPS.how_many_above, identity=0, dims=Slices(positions=()))
reduction(OPS.unsaid, identity=lowest)


@masked_rule(OPS.unsaid_by_hand, category=REDUCTION, dims=Slices())
def _unsaid_by_hand(x: Any, dim: int) -> Any:
    return type(x)(OPS.unsaid_by_hand(x.filled(lowest(x.dtype)), dim), x.any_valid(dim))


UNSAID = ["unsaid", "unsaid_by_hand"]


def matrix() -> Any:
    data = torch.tensor([[nan, nan, 5, 1], [0, nan, 7, nan], [nan, 2, nan, 3], [nan] * 4])
    return md.masked_tensor(data.nan_to_num(9), ~data.isnan()).to_sparse_csr()


def test_what_the_positions_are() -> None:
    x = matrix()
    with md.densify("never"):
        assert OPS.greatest(x, 1)[:3].tolist() == [2, 2, 3]
        assert OPS.first_above(x, 1)[:3].tolist() == [2, 2, 4]
        assert OPS.first_above_or_minus_one(x, 1)[:3].tolist() == [2, 2, -1]
        assert OPS.first_in_all(x).item() == 16
        assert OPS.how_many_above(x, 1)[:3].tolist() == [1, 1, 0]
        for name in ("value_and_place", "greatest_so_far"):
            for found, wanted in zip(getattr(OPS, name)(x, 1), getattr(OPS, name)(x.to_dense(), 1), strict=True):
                md.testing.assert_close(found.to_dense(), wanted)


@pytest.mark.parametrize("name", UNSAID)
def test_a_rule_that_does_not_say_which_results_are_positions_is_asked(name: str) -> None:
    x = matrix()
    with md.densify("never"), pytest.raises(md.MaskedSemanticsError, match=r"dims=Slices\(positions=\(0,\)\)"):
        getattr(OPS, name)(x, 1)


@pytest.mark.parametrize("name", ["greatest", "first_above_or_minus_one", "in_all", "how_many_above"])
def test_the_laws_know_of_positions(name: str) -> None:
    verdict = op_registry.check(getattr(OPS, name), laws=("P2", "P4"))
    assert verdict.of("P2") == "holds", verdict
    assert verdict.of("P4") == "holds", verdict
    assert bool(verdict), verdict
