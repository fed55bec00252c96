"""From triplets (user, item, stars) to a trained factorization and its ranking metrics, without a dense matrix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import masked_dispatch as md


def made_up_ratings(users: int, items: int, count: int, rank: int = 4) -> tuple[Tensor, Tensor]:
    """About `count` different (user, item), int64 of shape (2, n), and stars (n,) from a model of that rank."""
    generator = torch.Generator().manual_seed(0)
    position = torch.randint(users * items, (count,), generator=generator).unique()
    index = torch.stack([position // items, position % items])
    tastes, traits = torch.randn(users, rank, generator=generator), torch.randn(items, rank, generator=generator)
    liked = (tastes[index[0]] * traits[index[1]]).sum(1) / rank**0.5
    popular = torch.randn(items, generator=generator)[index[1]] / 2
    noise = torch.randn(len(position), generator=generator) / 4
    return index, (3 + liked + popular + noise).clamp_(1, 5)


def matrix(index: Tensor, stars: Tensor, shape: tuple[int, int]) -> Any:
    """The masked matrix that is valid where something was rated."""
    coo = torch.sparse_coo_tensor(index, stars, shape, check_invariants=True)
    return md.as_masked_tensor(coo).to_sparse_csr()


class Factorization(nn.Module):
    """Predicts `mean + user_bias[u] + item_bias[i] + P[u] · Q[i]`."""

    def __init__(self, users: int, items: int, rank: int, mean: float) -> None:
        super().__init__()
        self.P, self.Q = (nn.Parameter(torch.randn(n, rank) / 10) for n in (users, items))
        self.user_bias, self.item_bias = nn.Parameter(torch.zeros(users, 1)), nn.Parameter(torch.zeros(items))
        self.mean = mean

    def forward(self, where: Tensor) -> Tensor:
        """The predictions at the elements that `where` stores; its values take no part."""
        product = torch.sparse.sampled_addmm(where, self.P, self.Q.T, beta=0)
        return product + self.user_bias + self.item_bias + self.mean


def trained(model: Factorization, ratings: Tensor, steps: int, lr: float = 0.05) -> Iterator[float]:
    """The loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(ratings), ratings)
        loss.backward()
        optimizer.step()
        yield loss.item()


def recall_at(k: int, predicted: Tensor, held_out: Tensor, relevant: float = 4.0) -> Tensor:
    """Of each user's relevant held-out items, the share among the k with the highest predictions: (users,), invalid for
    a user without any.
    """
    found = held_out.gather(1, predicted.topk(k, 1).indices)
    is_relevant = (held_out >= relevant).to(predicted.dtype)
    return (found >= relevant).to(predicted.dtype).sum(1) / is_relevant.sum(1).mask_with(
        is_relevant.sum(1).to_tensor(0) > 0
    )


def ndcg_at(k: int, predicted: Tensor, held_out: Tensor) -> Tensor:
    """The gain of the k items with the highest predictions, discounted by rank, over that of the best k: (users,),
    invalid for a user of whom nothing is held out.
    """
    discount = 1 / torch.arange(2.0, k + 2).log2()
    found = held_out.gather(1, predicted.topk(k, 1).indices)
    return (found * discount).sum(1) / (held_out.topk(k, 1).values * discount).sum(1)
