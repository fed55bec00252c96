"""Locks for writes that read the values they overwrite, one per memory.

An in-place operation computes its functional form and writes the whole result back. If two threads write to different
elements of one tensor, the second would write old values over the first one's. So a thread computes and writes under
the lock of the target's memory, which views share; plain tensors that receive updates have a lock too.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
from torch import Tensor

from masked_dispatch.forks import Lock
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.shared_storage import StoredPieces
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from masked_dispatch.torch_internals import under_transform

_NAME = "masked_dispatch_lock"
_NO_LOCK = contextlib.nullcontext()
_of_sparse: weakref.WeakKeyDictionary[StoredPieces, Lock] = weakref.WeakKeyDictionary()


def lock_of(target: Tensor) -> contextlib.AbstractContextManager[Any]:
    """The lock of the memory of `target`; a sparse tensor, whose memory a write replaces, has its own.

    The lock is reentrant. Tensors that are traced, or wrapped by a transform, belong to one thread and have none.
    """
    if isinstance(target, SparseMaskedTensor):
        return _of_sparse.setdefault(target._kept, Lock()).here
    data = target._data if isinstance(target, MaskedTensor) else target
    if type(data) not in (Tensor, torch.nn.Parameter) or data.layout is not torch.strided or under_transform():
        return _NO_LOCK
    # A storage is one object that lives as long as its memory. Reading the dict and setting a default are atomic.
    notes = data.untyped_storage().__dict__
    lock: Lock = notes.get(_NAME) or notes.setdefault(_NAME, Lock())
    return lock.here
