"""Checks that a storage layout exists and fits a shape."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from op_registry.sparse.layout import DENSE, Layout
from op_registry.sparse.layout_registry import layout_names, layout_of


def check_layout(
    tensor: Tensor, layout: torch.layout | Layout, sparse_dim: int | None, blocksize: Sequence[int] | None
) -> str:
    """The name of a storage layout; ValueError if it does not fit the tensor's shape."""
    if layout is torch.strided:
        return DENSE
    known, shape = layout_of(layout), tuple(tensor.shape)
    if known is None:
        raise _unknown(layout)
    if not shape:
        raise ValueError("a tensor without dimensions cannot be stored sparsely; keep it dense")
    dims = known.check_dims(shape, sparse_dim)
    known.check_block(shape[:dims], blocksize)
    return known.name


def check_torch_sparse(layout: torch.layout) -> str:
    """The name of one of torch's sparse layouts; ValueError for any other."""
    known = layout_of(layout)
    if layout is torch.strided or (known is not None and known.in_torch_sparse is not known):
        raise ValueError(f"{layout} is not a layout of torch.sparse: x.to_tensor(fill) gives a plain strided tensor")
    if known is None:
        raise _unknown(layout)
    return known.name


def _unknown(layout: object) -> ValueError:
    return ValueError(f"{layout} is not a storage layout; choose from {', '.join((DENSE, *layout_names()))}")
