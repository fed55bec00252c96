"""Sequences of random views of a packed batch, compared with those of the padded batch."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from torch import Tensor

from packed_batches import B, H, T, alike, batch, plain


def random_view(x: Tensor, choose: random.Random) -> Callable[[Tensor], Tensor]:
    """A view that fits `x`, as a function."""
    kind = choose.choice(("permute", "merge", "split", "unsqueeze", "squeeze", "shape"))
    if kind == "permute" and x.ndim:
        order = choose.sample(range(x.ndim), x.ndim)
        return lambda t: t.permute(order)
    if kind == "merge" and x.ndim > 1:
        dim = choose.randrange(x.ndim - 1)
        return lambda t: t.flatten(dim, dim + 1)
    if kind == "split" and x.ndim:
        dim = choose.randrange(x.ndim)
        first = choose.choice([n for n in range(1, x.shape[dim] + 1) if x.shape[dim] % n == 0])
        return lambda t: t.unflatten(dim, (first, -1))
    if kind == "unsqueeze" and x.ndim < 6:
        dim = choose.randrange(x.ndim + 1)
        return lambda t: t.unsqueeze(dim)
    if kind == "squeeze":
        return lambda t: t.squeeze()
    shape = [choose.choice((1, 2, 3, B, T))]
    shape = shape if x.numel() % math.prod(shape) == 0 else [1]
    return lambda t: t.reshape(*shape, -1)


def check_random_views(seed: int, sizes: tuple[int, int]) -> None:
    """Stored densely where a view has no packed form; the values, masks and gradients are the same anyhow."""
    choose = random.Random(seed)
    x = batch("holes", H, 2).without_extent()[: sizes[0], : sizes[1]]
    twin, views = x.to_tensor(0), []
    for _ in range(7):
        views.append(random_view(twin, choose))
        twin = views[-1](twin)

    def run(t: Tensor) -> list[Tensor]:
        shown = [t.exp()]
        for view in views:
            shown.append(view(shown[-1]))
        return [*shown, shown[-1] * plain(*shown[-1].shape)]

    alike(run, [x], policy="auto")
