"""Nearest-neighbour interpolation on sparse storage: an index_select along each dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from op_registry.authoring import NotLowered, Rule, Sparse, select_along, shape_alone
from op_registry.ops.windows import interpolation

aten = torch.ops.aten


def _lower_nearest(rule: Rule) -> None:
    """Select along each dimension the indices that torch's 1-d kernel selects from a range."""

    def select_nearest(op: OpOverload, x: Sparse, output_size: Sequence[int] | None, *args: Any) -> Sparse:
        if not op._schema.name.startswith(("aten::upsample_nearest", "aten::_upsample_nearest")):
            raise NotLowered("it is a weighted mean of neighbours")
        if x.dtype is torch.uint8 or not x.dtype.is_floating_point or 0 in x.shape:
            raise NotLowered("it is empty, or torch has another kernel for its dtype")
        size = op(shape_alone(x.shape), output_size, *args).shape
        exact = "exact" in op._schema.name
        nearest_1d = aten._upsample_nearest_exact1d.default if exact else aten.upsample_nearest1d.default
        is_vec = op._overloadname == "vec"
        factors = args[0] if is_vec and args else list(args)
        indices = {}
        for n, dim in enumerate(range(2, x.ndim)):
            scale = factors[n] if factors and n < len(factors) else None
            positions = torch.arange(x.shape[dim], dtype=torch.float64, device=x.device).reshape(1, 1, -1)
            indices[dim] = nearest_1d(positions, [size[dim]], scale).reshape(-1).to(torch.int64)
        return select_along(x, indices)

    rule.lowering(Sparse)(select_nearest)


_lower_nearest(interpolation.upsample_nearest)
_lower_nearest(interpolation.upsample_vec)
