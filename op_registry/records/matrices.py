"""Dense records as matrices: transposes, and the validity of a product."""

from __future__ import annotations

import torch
from torch import Tensor

from op_registry.records.broadcast import aligned_validity, broadcast_along
from op_registry.records.dense import Dense, all_valid
from op_registry.records.validity import intersect


def product_validity(a: Dense, b: Dense) -> Tensor | None:
    """Validity of ``a @ b`` for matrices a (…, n, k) and b (…, k, m): (…, n or 1, m or 1); None if all are valid."""
    if a.shape[-1] == 0 or all_valid(a, b):
        return None
    if b.validity is None:
        return a.any_valid(-1, keepdim=True)
    if a.validity is None:
        return b.any_valid(-2, keepdim=True)
    rows, columns = aligned_validity(a), aligned_validity(b)
    assert rows is not None
    assert columns is not None
    if broadcast_along(rows, -1):
        return intersect(rows, b.any_valid(-2, keepdim=True))
    if broadcast_along(columns, -2):
        return intersect(a.any_valid(-1, keepdim=True), columns)
    # Counts sum non-negative terms: a single term keeps them ≥ 1 at any precision.
    return torch.matmul(rows.to(torch.float32), columns.to(torch.float32)) > 0.5


def transposed(x: Dense) -> Dense:
    """Exchange the last two dimensions of a record; its validity stays as small as it was."""
    v = aligned_validity(x)
    return Dense(x.data.mT, None if v is None else v.mT)
