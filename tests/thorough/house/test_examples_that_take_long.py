"""Examples and commands that take long."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import masked_dispatch as md
from examples.ratings.training import Factorization, made_up_ratings, matrix, ndcg_at, recall_at, trained
from pages import LONG_COMMANDS, PAGES_THAT_TAKE_LONG, name_of, run_command, run_examples


@pytest.mark.parametrize("page", PAGES_THAT_TAKE_LONG, ids=name_of)
def test_examples_print_what_the_page_says(page: Path) -> None:
    run_examples(page)


# ----------------------------------------------------------------------------------------------------------- commands


@pytest.mark.parametrize("command", LONG_COMMANDS)
def test_the_long_commands_of_op_registry_work(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(command) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 2


# ------------------------------------------------------------------------------------------------------------ ratings


SHAPE = 300, 200


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_it_learns_what_it_has_not_seen() -> None:
    index, stars = made_up_ratings(*SHAPE, 20_000)
    is_train = torch.rand(len(stars)) < 0.9
    with md.densify("never"):
        train, held_out = (matrix(index[:, part], stars[part], SHAPE) for part in (is_train, ~is_train))
        assert train.nnz + held_out.nnz == len(stars)
        model = Factorization(*SHAPE, 4, train.mean().item())
        before = torch.nn.functional.mse_loss(model(held_out), held_out).item()
        losses = list(trained(model, train, 100))
        predicted = model(held_out).detach()
        after = torch.nn.functional.mse_loss(predicted, held_out).item()
        assert losses[-1] < losses[0] / 4
        assert after < before / 4
        assert ndcg_at(5, predicted, held_out).mean().item() > ndcg_at(5, -predicted, held_out).mean().item() + 0.1
        assert recall_at(5, predicted, held_out).mean().item() > recall_at(5, -predicted, held_out).mean().item() + 0.1


def test_gradients_are_those_of_the_dense_product() -> None:
    index, stars = made_up_ratings(*SHAPE, 3000)
    model = Factorization(*SHAPE, 4, 3.0).double()
    ratings = matrix(index, stars.double(), SHAPE)
    torch.nn.functional.mse_loss(model(ratings), ratings).backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    u, i = index
    predicted = (model.P @ model.Q.T + model.user_bias + model.item_bias + model.mean)[u, i]
    torch.nn.functional.mse_loss(predicted, stars.double()).backward()
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def test_metrics_by_hand() -> None:
    held_out = md.masked_tensor(
        torch.tensor([[5.0, 1, 4, 3], [1, 2, 0, 0], [5, 0, 0, 0]]),
        torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]),
    )
    predicted = md.masked_tensor(torch.tensor([[1.0, 2, 3, 0], [1, 2, 9, 9], [9, 9, 9, 9]]), held_out.get_mask())
    for stored in (lambda x: x, lambda x: x.to_sparse_csr()):
        recall = recall_at(2, stored(predicted), stored(held_out))  # items 2 and 1 come first; 0 and 2 are relevant
        assert recall.get_mask().tolist() == [True, False, False]
        assert recall[0].item() == 0.5
        ndcg = ndcg_at(2, stored(predicted), stored(held_out))
        assert ndcg.get_mask().tolist() == [True, True, False]
        log = torch.tensor(3.0).log2()
        torch.testing.assert_close(ndcg[0].to_tensor(0), (4 + 1 / log) / (5 + 4 / log))
        assert ndcg[1].item() == 1
