"""Movements of hybrid and packed storage, along dense dimensions and those that mix with sparse ones: never dense."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from masked_dispatch import MaskedTensor, masked_tensor

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
