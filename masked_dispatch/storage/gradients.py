"""Gradients stored sparsely: of tables of which rows were looked up, and where two gradients are summed.

A plain parameter's gradient is plain, except where torch's own would be sparse: that one is masked, and stored as the
rows that were looked up (op_registry/row_gradients.py). What several backward calls leave in `.grad` is their union:
the autograd engine's sums are `accumulate`, also the one that it writes into a masked `.grad` of a plain leaf.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from masked_dispatch.gradient import closed
from masked_dispatch.interception import leaf_accumulated_into
from masked_dispatch.storage.boundary import closed_sparse, open_any
from masked_dispatch.tensor import MaskedTensor
from op_registry.accumulate import accumulate
from op_registry.merging import merged
from op_registry.patterns import OF_TORCH, Pattern, linear, unraveled
from op_registry.records import Dense
from op_registry.row_gradients import set_closer
from op_registry.sparse import NotLowered, Sparse, united
from op_registry.turned import AnyRecord, Turned, to_dense


def of_torch_sparse(tensor: Tensor) -> Sparse:
    """The record of one of torch's own sparse tensors, in COO: what it specifies is valid, duplicates accumulated."""
    coo = tensor if tensor.layout is torch.sparse_coo else tensor.to_sparse()
    indices, values = coo._indices(), coo._values()
    sizes = tuple(coo.shape[: coo.sparse_dim()])
    if not coo.is_coalesced():
        if len(sizes) == 1:
            listed, values = merged(indices[0], values)
            indices = listed.unsqueeze(0)
        else:
            listed, values = merged(linear(tuple(indices), sizes), values)
            indices = torch.stack(unraveled(listed, sizes))
    return Sparse(Dense(values), Pattern(torch.sparse_coo, sizes, (indices,)))


def masked_record(tensor: Tensor) -> Dense | Sparse | None:
    """The record, without derivatives, of a tensor that is masked or one of torch's sparse ones; None if plain."""
    if is_plain(tensor):
        return None
    record = _opened(tensor.detach())
    return to_dense(record) if isinstance(record, Turned) else record


def sum_of_gradients(x: Tensor, y: Tensor) -> Tensor:
    """The autograd engine's sum of two gradients of one tensor, of which what one lacks the other may have.

    It is plain where one of them is: that one is valid everywhere, as a plain tensor's gradient has to be.
    """
    given = [_opened(x), _opened(y)]
    if all(isinstance(record, Sparse) for record in given):
        with contextlib.suppress(NotLowered):
            return closed_sparse(united(given))  # type: ignore[arg-type]
    total = accumulate([to_dense(record) for record in given])
    return total.data if any(is_plain(t) for t in (x, y)) else closed(total)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is valid everywhere: not masked, and not one of torch's sparse ones."""
    return not isinstance(tensor, MaskedTensor) and tensor.layout not in OF_TORCH


def _opened(tensor: Tensor) -> AnyRecord:
    if isinstance(tensor, MaskedTensor):
        return open_any(tensor)
    return Dense(tensor, None) if tensor.layout not in OF_TORCH else of_torch_sparse(tensor)


def united_into(target: MaskedTensor, addend: Tensor) -> Tensor | None:
    """What the engine is to leave in the masked `.grad` of a plain leaf; None where this is no such sum."""
    leaf = leaf_accumulated_into()
    if leaf is None or isinstance(leaf, MaskedTensor):
        return None
    return sum_of_gradients(target, addend)


def install() -> None:
    """Let look-ups make gradients of rows: called once, when the package is imported."""
    set_closer(closed_sparse)
