"""Take the valid rows out of a batch (batch, time, width) with one validity per row, and put rows back."""

from __future__ import annotations

import torch
from torch import Tensor

from op_registry.records.dense import Dense
from op_registry.records.kept import kept_with
from op_registry.records.zeros import remember_zero


def valid_rows(x: Dense) -> tuple[Tensor, list[int]]:
    """Positions of valid rows among all flattened rows, and their number in each sequence; cached with the mask."""
    validity, (batch, time, _) = x.validity, x.shape
    assert validity is not None

    def find() -> tuple[Tensor, list[int]]:
        valid = validity.view(validity.shape[:2]).expand(batch, time)
        counts: list[int] = valid.sum(1, dtype=torch.int64).tolist()
        return valid.reshape(-1).nonzero().squeeze(1), counts

    if validity.is_inference() or torch.is_inference_mode_enabled():
        return find()
    kept = kept_with(validity)
    found: tuple[Tensor, list[int]] | None = kept.get(("rows", batch, time))
    if found is None:
        found = kept["rows", batch, time] = find()
    return found


def take_rows(x: Dense, positions: Tensor) -> Tensor:
    """The rows (n, width) at these positions."""
    return x.data.reshape(-1, x.shape[-1]).index_select(0, positions)


def put_rows(rows: Tensor, positions: Tensor, x: Dense) -> Dense:
    """A record like `x` with `rows` (n, width) at these positions, the valid rows of `x`; zeros elsewhere."""
    batch, time, _ = x.shape
    data = rows.new_zeros(batch * time, rows.shape[1]).index_copy(0, positions, rows).view(batch, time, rows.shape[1])
    if x.validity is not None:
        remember_zero(data, x.validity)
    return Dense(data, x.validity)
