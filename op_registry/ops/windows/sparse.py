"""Nearest-neighbour interpolation on sparse storage: an index_select along each dimension."""

from __future__ import annotations

import torch

from op_registry.authoring import Bound, NotLowered, Sparse, on_call, packet_name, select_along, shape_alone
from op_registry.ops.windows import interpolation

aten = torch.ops.aten


@interpolation.upsample_nearest.lowering(Sparse)
@interpolation.upsample_vec.lowering(Sparse)
@on_call(elements=True)
def select_nearest(c: Bound) -> Sparse:
    """Select along each dimension the indices that torch's 1-d kernel selects from a range."""
    x, name = c.first, packet_name(c.op)
    if "nearest" not in name or not x.dtype.is_floating_point:
        raise NotLowered("it is a weighted mean of neighbours, or torch has another kernel for its dtype")
    size = c.map(lambda r: shape_alone(r.shape), Sparse).applied(c.op).shape
    nearest_1d = aten._upsample_nearest_exact1d.default if "exact" in name else aten.upsample_nearest1d.default
    factors = c.scale_factors if "scale_factors" in c else [v for n, v in c.named.items() if n.startswith("scales")]
    indices = {}
    for n, dim in enumerate(range(2, x.ndim)):
        positions = torch.arange(x.shape[dim], dtype=torch.float64, device=x.device).reshape(1, 1, -1)
        scale = factors[n] if factors else None
        indices[dim] = nearest_1d(positions, [size[dim]], scale).reshape(-1).to(torch.int64)
    return select_along(x, indices)
