"""Writing to and from sparse storage."""

from __future__ import annotations

import torch
from torch import Tensor

from masked_dispatch.gradient import opened
from masked_dispatch.storage.boundary import opened_sparse
from masked_dispatch.storage.wrapper import SparselyStored
from masked_dispatch.tensor import MaskedTensor
from op_registry import MaskedSemanticsError
from op_registry.places import gathered, scatter_
from op_registry.records import Dense, as_bool
from op_registry.sparse import from_dense, in_layout


def update_places(target: Tensor, result: SparselyStored) -> Tensor:
    """A plain tensor takes the valid values of `result` in their places; nothing of its size is made."""
    record = opened_sparse(result)
    flat, places = record.flat, record.pattern.places()
    values = flat.data.to(target.dtype)
    valid = flat.full_validity
    if valid is not None:
        values = torch.where(as_bool(valid), values, gathered(target, places))
    return scatter_(target, places, values)


def store(target: SparselyStored, source: Tensor) -> None:
    """Let `target` store what `source` holds, in its own layout and dtype, below autograd."""
    if target._is_graph_input:
        raise MaskedSemanticsError(
            f"an in-place operation on a masked tensor of shape {tuple(target.shape)} that is stored as "
            f"{target.storage_layout} and was given to a compiled function: a graph cannot exchange what its argument "
            "stores. Return the out-of-place result, or work on x.clone()."
        )
    layout, block = target._pattern.layout, target._pattern.block
    if isinstance(source, SparselyStored):
        record = in_layout(source.record, layout, block)
    else:
        dense = opened(source) if isinstance(source, MaskedTensor) else Dense(source, None)
        dense = dense.moved(lambda t: t.expand(target.shape))
        record = from_dense(dense, layout, target._pattern.ndim, block)
    values = record.values
    record.values = Dense(values.data.to(target.dtype, copy=True), values.validity)
    target.keep(record)
