"""Checks that a storage layout exists and fits a shape."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from op_registry.sparse.layout import DENSE, Layout, layout_names, layout_of


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
    _check_integers(shape, sparse_dim, blocksize)
    dims = known.check_dims(shape, sparse_dim)
    known.check_block(shape[:dims], blocksize)
    return known.name


def sparse_dims_beside(tensor: Tensor, dense_dim: int | None) -> int:
    """The number of sparse dimensions of a tensor with `dense_dim` dense ones (None: 0); TypeError if no integer."""
    if dense_dim is not None and not _is_integer(dense_dim):
        raise TypeError(
            f"dense_dim is the number of trailing dense dimensions, an integer from 0 to {tensor.ndim - 1} for shape "
            f"{tuple(tensor.shape)}; got {dense_dim!r}"
        )
    return tensor.ndim - (dense_dim or 0)


def _check_integers(shape: tuple[int, ...], sparse_dim: object, blocksize: object) -> None:
    if sparse_dim is not None and not _is_integer(sparse_dim):
        raise TypeError(
            f"sparse_dim is the number of leading sparse dimensions, an integer from 1 to {len(shape)} for shape "
            f"{shape}; got {sparse_dim!r}. To choose a layout pass it by name: x.to_sparse(layout=torch.sparse_csr)"
        )
    if isinstance(blocksize, (tuple, list)) and not all(map(_is_integer, blocksize)):
        raise TypeError(f"a blocksize is two integers (rows, columns), not {blocksize!r}")


def _is_integer(value: object) -> bool:
    return isinstance(value, (int, torch.SymInt)) or hasattr(value, "__index__")


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
