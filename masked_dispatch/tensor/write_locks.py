"""Locks for writes that read what they overwrite, one for each memory.

An in-place operation computes its functional form and writes all of the result back. Of two threads that write to
different elements of one tensor, the second would write back what the first has overwritten. So the whole is done under
the lock of the memory that is written to, which views share; a plain tensor that is updated has one, too.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
from torch import Tensor

from masked_dispatch.forks import Lock
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor, StoredPieces
from masked_dispatch.torch_internals import under_transform

_NAME = "masked_dispatch_lock"
_NO_LOCK = contextlib.nullcontext()
_of_sparse: weakref.WeakKeyDictionary[StoredPieces, Lock] = weakref.WeakKeyDictionary()


def lock_of(target: Tensor) -> contextlib.AbstractContextManager[Any]:
    """The lock of the memory that `target` lies in; of a sparse tensor, whose memory a write replaces, its own.

    Reentrant. Tensors that are traced, or wrapped by a transform, are one thread's own and have none.
    """
    if isinstance(target, SparseMaskedTensor):
        return _of_sparse.setdefault(target._kept, Lock()).here
    data = target._data if isinstance(target, MaskedTensor) else target
    if type(data) not in (Tensor, torch.nn.Parameter) or data.layout is not torch.strided or under_transform():
        return _NO_LOCK
    # A storage lives as long as its memory, and is one object. Reading the dict and setting a default are atomic.
    notes = data.untyped_storage().__dict__
    lock: Lock = notes.get(_NAME) or notes.setdefault(_NAME, Lock())
    return lock.here
