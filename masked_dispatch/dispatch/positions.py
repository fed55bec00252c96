"""The operators behind masked_dispatch.first, last, align and positions: each sample's own positions.

A tensor without an extent, a plain one too, is there everywhere: one spelling serves a batch and a sample.
"""

from __future__ import annotations

import torch
from torch import Tensor

from masked_dispatch.autograd.dense import wrap_record
from masked_dispatch.autograd.sparse import unwrap_any
from masked_dispatch.densify_policy import check_allowed
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from op_registry.extents import samples
from op_registry.extents.factors import Merged, as_positions, is_prefix
from op_registry.records.dense import Dense
from op_registry.sparse.permuted import to_dense


def ends(tensor: Tensor, dim: int, k: int, last: bool) -> Tensor:
    dim, in_order = _positions_of(tensor, dim, name := "last" if last else "first")
    k = min(k, tensor.shape[dim])
    if in_order is None:
        return tensor.narrow(dim, tensor.shape[dim] - k if last else 0, k).clone()
    if isinstance(tensor, SparseMaskedTensor) and in_order:
        return tensor.flip(dim).narrow(dim, 0, k).flip(dim) if last else tensor.narrow(dim, 0, k).clone()
    return wrap_record(samples.ends(_dense(name, tensor), dim, k, last))


def align(tensor: Tensor, dim: int) -> Tensor:
    dim, in_order = _positions_of(tensor, dim, "align")
    return tensor if in_order is not False else wrap_record(samples.compacted(_dense("align", tensor), dim))


def positions(tensor: Tensor, dim: int) -> Tensor:
    dim, in_order = _positions_of(tensor, dim, "positions")
    if in_order is not None:
        return wrap_record(samples.positions(unwrap_any(tensor), dim))
    count = torch.arange(tensor.shape[dim], device=tensor.device)
    return count.expand(tensor.shape[0], -1).clone() if dim else count


def _dense(operation: str, tensor: Tensor) -> Dense:
    """The record for an operation that moves each sample's positions; the policy decides if it is sparse."""
    record = unwrap_any(tensor)
    if isinstance(tensor, SparseMaskedTensor):
        check_allowed(operation, [tensor], "it moves each sample's own positions")
    return record if isinstance(record, Dense) else to_dense(record)


def _positions_of(x: Tensor, dim: int, name: str) -> tuple[int, bool | None]:
    """The dimension, not negative, and whether each sample's positions are known to be its first indices.

    None: the tensor is there everywhere.
    """
    shape = tuple(x.shape)
    if not -x.ndim <= dim < x.ndim:
        raise IndexError(f"{name}: dim={dim} is out of range for a tensor of shape {shape}")
    dim = dim % x.ndim
    extent = x._extent if isinstance(x, MaskedTensor) else None
    if extent is None or not extent.factors:
        return dim, None
    if not extent.numbers(dim):
        raise ValueError(
            f"{name}: dimension {dim} of a tensor of shape {shape} numbers no positions of its samples; these "
            f"do: {', '.join(map(str, extent.positions)) or 'none'}. masked_dispatch.padded(x, extent) says which "
            "positions are there"
        )
    known = [factor.along[dim] for factor in extent.factors]
    if any(isinstance(as_positions(along), Merged) for along in known):
        raise ValueError(
            f"{name}: dimension {dim} of a tensor of shape {shape} is merged of positions and others; "
            "split it first, x.unflatten(dim, sizes)"
        )
    return dim, all(along is None or is_prefix(along) for along in known)
