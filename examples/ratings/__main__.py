"""``python -m examples.ratings``: 100,000 users, 50,000 items, 5 million ratings, and how much memory they took."""

from __future__ import annotations

import argparse
import resource
import time

import torch

import masked_dispatch as md
from examples.ratings.training import Factorization, made_up_ratings, matrix, ndcg_at, recall_at, trained


def peak() -> float:
    """The largest resident size of this process so far, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.ratings", description=__doc__)
    for name, default in (("users", 100_000), ("items", 50_000), ("ratings", 5_000_000), ("rank", 8), ("steps", 50)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    shape = options.users, options.items
    torch.manual_seed(0)
    index, stars = made_up_ratings(*shape, options.ratings)
    is_train = torch.rand(len(stars)) < 0.8
    before = peak()
    with md.densify("never"):  # raises if anything would store a dense matrix of users by items
        train, held_out = (matrix(index[:, part], stars[part], shape) for part in (is_train, ~is_train))
        model = Factorization(*shape, options.rank, train.mean().item())
        for step, loss in enumerate(trained(model, train, options.steps)):
            if step == 0:
                start = time.perf_counter()
            if step % 10 == 9:
                print(f"step {step + 1}: loss {loss:.3f}")
        seconds = (time.perf_counter() - start) / max(options.steps - 1, 1)
        with torch.no_grad():
            predicted = model(held_out)
        error = torch.nn.functional.mse_loss(predicted, held_out).sqrt()
        recall, ndcg = (metric(5, predicted, held_out).mean() for metric in (recall_at, ndcg_at))
    print(f"held out: rmse {error.item():.3f}, recall@5 {recall.item():.3f}, ndcg@5 {ndcg.item():.3f}")
    dense = options.users * options.items * 4 / 1e9
    print(f"a step {seconds:.1f} s, at most {peak() - before:.2f} GB; the dense matrix alone: {dense:.1f} GB")


if __name__ == "__main__":
    main()
