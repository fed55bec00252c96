"""`x.new_tensor(…)` and `x.new(…)`, which torch implements in C++ for tensors that have memory of their own."""

from __future__ import annotations

from numbers import Integral
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from op_registry import MaskedSemanticsError

if TYPE_CHECKING:
    from masked_dispatch.tensor.masked_tensor import MaskedTensor


def new_tensor(
    like: MaskedTensor,
    data: object,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    pin_memory: bool,
) -> Tensor:
    """A copy of `data` (a tensor, a number, nested lists, an array), as valid as `data` is, of the dtype of `like`.

    Without a `device`, a tensor stays on its own, and other data goes to that of `like`, as in torch.
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
    """What `x.new(…)` makes of anything but a tensor: uninitialised memory of a size, or a copy of data.

    As in torch, integers and a torch.Size are a size, and other sequences are data. Raises MaskedSemanticsError for a
    storage, which has no mask.
    """
    (first, *others) = args or (0,)
    if isinstance(first, (torch.UntypedStorage, torch.TypedStorage)):
        raise MaskedSemanticsError(
            f"x.new(storage) of a masked tensor of {like.dtype} would be a masked tensor around a storage of "
            f"{first.nbytes()} bytes, and nothing says which of its elements are valid. Make a plain tensor of it, "
            "torch.empty(0, dtype=…).set_(storage), and mask that: as_masked_tensor(data, mask)."
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
    return new_tensor(like, first, None, device, pin_memory=False)
