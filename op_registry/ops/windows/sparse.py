"""Interpolation by nearest neighbours on sparse storage: positions selected along each dimension."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from op_registry.authoring import NotLowered, Sparse, select_along
from op_registry.ops.windows import interpolation

aten = torch.ops.aten


def _nearest(rule: Any) -> None:
    """Nearest neighbours: along each dimension the index that torch's kernel has for a line of its own."""

    def run(op: OpOverload, x: Any, output_size: Any, *args: Any) -> Any:
        if not op._schema.name.startswith(("aten::upsample_nearest", "aten::_upsample_nearest")):
            raise NotLowered("it weighs neighbours")
        if x.dtype is torch.uint8 or not x.dtype.is_floating_point or 0 in x.shape:
            raise NotLowered("there is nothing in it, or torch has kernels of its own")
        size = op(torch.empty(x.shape, device="meta", dtype=x.dtype), output_size, *args).shape
        exact = "exact" in op._schema.name
        line_op = aten._upsample_nearest_exact1d.default if exact else aten.upsample_nearest1d.default
        by_vec = op._overloadname == "vec"
        factors = args[0] if by_vec and args else list(args)
        chosen = {}
        for n, dim in enumerate(range(2, x.ndim)):
            scale = factors[n] if factors and n < len(factors) else None
            line = torch.arange(x.shape[dim], dtype=torch.float64, device=x.device).reshape(1, 1, -1)
            chosen[dim] = line_op(line, [size[dim]], scale).reshape(-1).to(torch.int64)
        return select_along(x, chosen)

    rule.lowering(Sparse)(run)


_nearest(interpolation.upsample_nearest)
_nearest(interpolation.upsample_vec)
