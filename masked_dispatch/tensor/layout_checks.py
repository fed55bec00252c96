"""Whether a storage layout fits a shape."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from op_registry.sparse.pattern import LAYOUTS, OF_BLOCKS, PACKED


def check_layout(tensor: Tensor, layout: torch.layout, sparse_dim: int | None, blocksize: Sequence[int] | None) -> None:
    """Refuse storage that does not fit the tensor's shape."""
    shape = tuple(tensor.shape)
    if layout is torch.strided:
        return
    if layout not in LAYOUTS:
        raise ValueError(f"{layout} is no storage; there are torch.strided, {', '.join(map(str, LAYOUTS))}")
    if not shape:
        raise ValueError("a tensor without dimensions has nothing to store sparsely; it stays dense")
    if layout is PACKED and (len(shape) < 2 or sparse_dim not in (None, 2)):
        raise ValueError(
            f"packed storage is that of a batch (B, T, …), of which the first 2 dimensions are sparse: shape {shape} "
            f"cannot be stored so{'' if sparse_dim is None else f' with sparse_dim={sparse_dim}'}"
        )
    default = 2 if layout is PACKED else len(shape)
    dims = default if sparse_dim is None else sparse_dim
    least = 1 if layout is torch.sparse_coo else 2
    if not least <= dims <= len(shape):
        raise ValueError(
            f"{layout} of a tensor of shape {shape} has at least {least} sparse dimension{'s' * (least > 1)} and at "
            f"most {len(shape)}, and is asked to have {dims}; the other dimensions are dense"
        )
    if blocksize is not None and (not isinstance(blocksize, (tuple, list, torch.Size)) or len(blocksize) != 2):
        raise ValueError(f"a blocksize is (rows, columns), not {blocksize!r}")
    if (blocksize is not None) != (layout in OF_BLOCKS):
        raise ValueError(
            f"{layout} needs a blocksize (rows, columns)" if blocksize is None else f"{layout} has no blocks"
        )
    if blocksize is not None:
        rows, columns = blocksize
        if rows < 1 or columns < 1 or shape[dims - 2] % rows or shape[dims - 1] % columns:
            raise ValueError(f"blocks of {tuple(blocksize)} do not divide a matrix of {shape[dims - 2 : dims]}")
