"""Draws of multivariate normal distributions, loc + L·eps, which torch writes in Python.

Law: a matrix counts whole or not at all. A draw with a part of L left out would be one of another distribution. A hole
in loc is another matter, and elementwise: an element of a draw depends on no other element of loc, and without one of
its coordinates a normal distribution is the normal distribution of the others.
"""

from __future__ import annotations

import torch
from torch.distributions import multivariate_normal

from op_registry.authoring import WHOLE_SLICES, Dense, inside, intersect, replaced, whole_validity

aten = torch.ops.aten


@inside(multivariate_normal._batch_mv, aten.matmul.default, category=WHOLE_SLICES)
def batch_mv(self: Dense, other: Dense) -> Dense:
    """Matrices (…, n, m) by columns (…, m, 1): valid where the matrix and the column are whole."""
    matrices, columns = whole_validity(self), whole_validity(other)
    product = torch.matmul(replaced(self, matrices, 0), replaced(other, columns, 0))
    return Dense(product, intersect(matrices, columns))
