"""Questions about sizes, which are symbols in a graph."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def known_to_hold(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on sizes holds; False in a graph whose sizes depend on data, as those of ``x[mask]`` do."""
    if not isinstance(condition, torch.SymBool):  # sizes are tensors under torch.jit.trace
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def known_in_forward(sizes: Iterable[int]) -> None:
    """Let a graph of any sizes take these as numbers now, because torch's backward reads them as numbers.

    If it learned them in backward, it would return other gradients of masked tensors than torch made it for.
    """
    for size in sizes:
        int(size)
