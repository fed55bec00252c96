"""Views of packed batches that merge their dimensions or turn them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from packed_batches import B, D, H, T, heads

BH = B * H
MERGED: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x.view(-1, D),
    "time first": lambda x: x.transpose(0, 1),
    "rows, time first": lambda x: x.transpose(0, 1).reshape(-1, D),
    "batch times heads": lambda x: heads(x).reshape(BH, T, 2),
    "time, then batch times heads": lambda x: x.transpose(0, 1).reshape(T, BH, 2),
}
