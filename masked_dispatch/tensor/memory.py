"""Other memory for a masked tensor, and one lock for each memory, for writes that read what they overwrite."""

from __future__ import annotations

import contextlib
import weakref
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from masked_dispatch.process import Lock
from masked_dispatch.tensor.mask_sharing import make_view_family
from masked_dispatch.tensor.masked_tensor import MaskedTensor, wrap
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from masked_dispatch.tensor.storage import StoredPieces
from masked_dispatch.tensor.traced import CODE_VERSION
from masked_dispatch.torch_internals import under_transform
from op_registry import MaskedSemanticsError, registry
from op_registry.records.dense import Dense
from op_registry.records.tracing import being_traced

# -------------------------------------------------------------------------------------- x.new_tensor, x.new, x.data = y

# ------------------------------------------------------------------------------------------------- buffers like another


def new_tensor(
    self: MaskedTensor,
    data: object,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
    layout: torch.layout = torch.strided,
    pin_memory: bool = False,
) -> Tensor:
    """A leaf with a copy of `data` and its mask; dtype and device default to this tensor's."""
    if layout is not torch.strided:
        raise MaskedSemanticsError(
            f"x.new_tensor(data, layout={layout}) would give a torch.sparse tensor, which has no place for a mask. "
            f"Leave the layout out, and store the result sparsely: x.new_tensor(data).to_layout({layout})."
        )
    made = copy_of_data(self, data, dtype, device, pin_memory)
    return made.requires_grad_() if requires_grad else made


def new(self: MaskedTensor, *args: object, device: torch.device | str | None = None) -> Tensor:
    """`new(sizes)` returns uninitialised, hence invalid, memory; `new(sequence)` calls new_tensor; `new(tensor)` makes
    an alias of that tensor with its own mask.
    """
    if len(args) == 1 and isinstance(args[0], Tensor):
        return alias_of(self, args[0])
    return new_of_size_or_data(self, args, device)


def alias_of(like: MaskedTensor, other: Tensor) -> Tensor:
    """A masked alias of `other` with its own mask; TypeError unless it has the dtype and device of `like`."""
    if (other.dtype, other.device) != (like.dtype, like.device):
        raise TypeError(
            f"x.new(tensor) shares the tensor's memory, so that has to be {like.dtype} on {like.device}, like x; it is "
            f"{other.dtype} on {other.device}. To copy it, use x.new_tensor(tensor)."
        )
    if not isinstance(other, MaskedTensor):
        return torch.ops.masked_dispatch.as_masked_tensor(other, None, CODE_VERSION + registry.version)
    return other.view_as(other) if other.requires_grad and torch.is_grad_enabled() else other.detach()


def copy_of_data(
    like: MaskedTensor,
    data: object,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    pin_memory: bool,
) -> Tensor:
    """A copy of `data` (a tensor, a number, nested lists, an array) and its mask, in the dtype of `like`.

    Without a `device`, a tensor stays on its device, and other data goes to the device of `like`, as in torch.
    """
    dtype = like.dtype if dtype is None else dtype
    if isinstance(data, Tensor):
        source, device = data.detach(), data.device if device is None else device
    else:
        source = torch.tensor(data, dtype=dtype, device=like.device if device is None else device)
    with torch.no_grad():
        buffer = like.new_empty(
            source.shape, dtype=dtype, device=source.device if device is None else device, pin_memory=pin_memory
        )
        return buffer.copy_(source)


def new_of_size_or_data(like: MaskedTensor, args: tuple[object, ...], device: torch.device | str | None) -> Tensor:
    """The result of `x.new(…)` for arguments other than a tensor: uninitialised memory of a size, or a copy of data.

    As in torch, integers and a torch.Size mean a size, and other sequences mean data. Raises MaskedSemanticsError for a
    storage, which has no mask.
    """
    (first, *others) = args or (0,)
    if isinstance(first, (torch.UntypedStorage, torch.TypedStorage)):
        raise MaskedSemanticsError(
            f"x.new(storage) of a masked tensor of {like.dtype} would be a masked tensor around a storage of "
            f"{first.nbytes()} bytes, and nothing says which of its elements are valid. Make a plain tensor of it, "
            "torch.empty(0, dtype=...).set_(storage), and mask that: as_masked_tensor(data, mask)."
        )
    if isinstance(first, torch.Size) and not others:
        return like.new_empty(first, device=device)
    if isinstance(first, (Integral, torch.SymInt)):
        return like.new_empty((first, *others), device=device)  # type: ignore[arg-type]
    if others:
        raise TypeError(
            f"x.new takes sizes, a tensor, or data in one sequence; got {len(args)} arguments, the first of type "
            f"{type(first).__name__}"
        )
    return copy_of_data(like, first, None, device, pin_memory=False)


# ---------------------------------------------------------------------------------------------------------- x.data = y


def set_data(self: MaskedTensor, value: object) -> None:
    dense = type(value) is MaskedTensor and type(self) is MaskedTensor
    if not (isinstance(value, MaskedTensor) and dense and like_each_other(self, value)):
        given = f"{tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else "no tensor"
        raise MaskedSemanticsError(
            "x.data = y takes a densely stored masked tensor of the shape, dtype and device of x "
            f"({tuple(self.shape)}, {self.dtype}, {self.device}), and x stored densely; y is a {type(value).__name__} "
            f"({given}). Use x.copy_(y) under torch.no_grad() to write values and mask, or x.get_data() to access the "
            "stored values."
        )
    if being_traced(value._data) or self._carries_transform or value._carries_transform:
        raise MaskedSemanticsError(
            f"x.data = y of a masked tensor of shape {tuple(self.shape)} inside a compiled region or a transform would "
            "replace an input of the graph. Use x.copy_(y) under torch.no_grad()."
        )
    exchange(self, Dense(value._data, value._validity, value._extent))
    make_view_family(value, self)


def like_each_other(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and device."""
    return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


_torch_data: Any = torch.Tensor.data


def exchange(tensor: MaskedTensor, record: Dense) -> None:
    """Make `tensor` wrap the memory of `record`; it is then no longer a view or a base of other tensors."""
    _torch_data.__set__(tensor, wrap(record.data, record.validity))
    tensor._data, tensor._stored_validity, tensor._stored_extent = record.data, record.validity, record.extent
    tensor._family = tensor._part_of_memory = tensor._snapshot = tensor._validity_alias = None


def install_buffers() -> None:
    """Called once, when the package is imported."""
    methods: Any = MaskedTensor
    methods.new_tensor, methods.new = new_tensor, new
    # Reading works as on a plain tensor; torch's assignment would change the wrapper, but not its inner tensors.
    methods.data = property(_torch_data.__get__, set_data)


# ---------------------------------------------------------------------------------------------------------------- locks

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
