"""Products of groups of rows, each with a matrix of its own (torch.nn.functional.grouped_mm).

Law: that of matmul.py for each group. ``offs`` says where groups end: of the rows of a matrix `self`, of the columns of
a matrix `mat2`, or of the contracted dimension if both are matrices. torch leaves rows and columns after the last group
uninitialised, in the result and in the gradient, so they are invalid here. A group without elements sums nothing: 0,
valid. An invalid offset is refused: it is unknown then where a group ends.
"""

from __future__ import annotations

import torch
from torch import Tensor

from op_registry.authoring import (
    CONTRACTION,
    Dense,
    Equation,
    MaskedSemanticsError,
    all_valid,
    as_int8,
    gradients_may_flow,
    intersect,
    known_all_valid,
    masked_rule,
)
from op_registry.records.validity import unite

aten = torch.ops.aten


@masked_rule(
    aten._grouped_mm.default,
    category=CONTRACTION,
    dims=Equation("rk,gkn,?,?->rn", "gmk,kr,?,?->mr", "gmk,gkn,?,?->gmn", scanned="r"),
)
def _grouped_mm(
    self: Dense,
    mat2: Dense,
    offs: Dense | None = None,
    bias: Dense | None = None,
    out_dtype: torch.dtype | None = None,
) -> Dense:
    ends = None if offs is None else known_ends(offs)
    # The dimension of each matrix that is cut into groups; an operand of three dimensions has a matrix for each.
    along = [None if x.ndim == 3 else d for x, d in ((self, 0 if mat2.ndim == 3 else 1), (mat2, self.ndim - 2))]
    factors = [in_groups(x, dim, ends) for x, dim in zip((self, mat2), along, strict=True)]
    data = aten._grouped_mm(*factors, ends, None if bias is None else bias.filled(0), out_dtype)
    validity = None if all_valid(self, mat2) else product_of_validities(self, mat2, ends)
    if ends is not None and None in along:
        dim = 0 if self.ndim == 2 else 1
        validity = intersect(validity, as_int8(in_some_group(data, dim, ends)))
    return Dense(data, validity if bias is None else intersect(validity, bias.validity))


def known_ends(offs: Dense) -> Tensor:
    """Where each group ends; MaskedSemanticsError if that is not known of each."""
    if not known_all_valid(offs):
        raise MaskedSemanticsError(
            f"grouped_mm has no meaning if it is unknown where a group ends: of the {offs.data.numel()} elements of "
            "`offs` some are invalid, and the next group begins there. Make a group without rows of it: "
            "offs.to_tensor(0).cummax(0).values.to(torch.int32)."
        )
    return offs.data


def in_groups(x: Dense, dim: int | None, ends: Tensor | None) -> Tensor:
    """The factor, with 0 for what belongs to no group, which is never read, but whose gradient torch leaves unwritten.

    `dim` is None for an operand that has a matrix for each group.
    """
    data = x.filled(0)
    if dim is None or ends is None or not gradients_may_flow(data):
        return data
    return data.masked_fill(~in_some_group(data, dim, ends), 0)


def in_some_group(data: Tensor, dim: int, ends: Tensor) -> Tensor:
    """Which indices of a dimension of a matrix belong to a group; of size 1 in the other dimension."""
    inside = torch.arange(data.shape[dim], device=data.device) < ends[-1]
    return inside.unsqueeze(1 - dim)


def product_of_validities(a: Dense, b: Dense, ends: Tensor | None) -> Tensor:
    """Where at least one pair of valid factors is summed, or a group has none to sum."""
    ones = [x.like(torch.ones_like(x.data)).filled(0) for x in (a, b)]
    valid = as_int8(aten._grouped_mm(*ones, ends) > 0.5)
    if ends is None or a.ndim != b.ndim:
        return valid
    empty = torch.diff(ends, prepend=ends.new_zeros(1)) <= 0
    united = unite(valid, as_int8(empty)[:, None, None])
    assert united is not None
    return united
