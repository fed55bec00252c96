"""Questions about sizes, which are symbols in a graph."""

from __future__ import annotations

import torch


def known_to_hold(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on sizes holds; False in a graph whose sizes depend on data, as those of ``x[mask]`` do."""
    if not isinstance(condition, torch.SymBool):  # sizes are tensors under torch.jit.trace
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)
