"""Dense records as matrices: transposes, and the validity of a product."""

from __future__ import annotations

import torch
from torch import Tensor

from op_registry.dimensions.equation import Equation
from op_registry.records.broadcast import aligned_validity
from op_registry.records.contracted import validity_of_sum
from op_registry.records.dense import Dense

_PRODUCT = Equation("*nk,*km->*nm")


def product_validity(a: Dense, b: Dense) -> Tensor | None:
    """Validity of ``a @ b`` for matrices a (…, n, k) and b (…, k, m): (…, n or 1, m or 1); None if all are valid."""
    factors = {"self": a, "other": b}
    labels = _PRODUCT.labels(torch.ops.aten.matmul.default, factors)
    assert labels is not None
    return validity_of_sum(labels, factors)


def transposed(x: Dense) -> Dense:
    """Exchange the last two dimensions of a record; its validity stays as small as it was."""
    v = aligned_validity(x)
    return Dense(x.data.mT, None if v is None else v.mT)
