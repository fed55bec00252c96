"""Methods of torch.Tensor that need a single block of memory: a masked tensor has none, and refuses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from masked_dispatch.replacements.replacing import no_call, replace
from masked_dispatch.tensor.messages import called_on_memory, data_pointer_requested, memory_requested, memory_shown
from op_registry import MaskedSemanticsError

if TYPE_CHECKING:
    _Base = Tensor
else:
    _Base = object


class WithoutMemory(_Base):
    """A tensor whose values and mask are other tensors."""

    def data_ptr(self) -> NoReturn:
        raise MaskedSemanticsError(data_pointer_requested(self))

    def storage(self) -> NoReturn:
        raise MaskedSemanticsError(memory_requested(self))

    def apply_(self, callable: object) -> NoReturn:
        raise MaskedSemanticsError(called_on_memory(self, "apply_"))

    def map_(self, tensor: Tensor, callable: object) -> NoReturn:
        raise MaskedSemanticsError(called_on_memory(self, "map_"))

    def map2_(self, x: Tensor, y: Tensor, callable: object) -> NoReturn:
        raise MaskedSemanticsError(called_on_memory(self, "map2_"))


def install() -> None:
    """Let a wrapper's storage print, by which torch knows which tensors share memory; called once, at import."""

    def shown(original: Callable[..., str], storage: torch.UntypedStorage) -> str:
        try:
            return original(storage)
        except RuntimeError:  # the storage has a size, but no memory
            return memory_shown(storage.nbytes(), storage.device)

    replace(torch.UntypedStorage, "__repr__", shown, no_call, always=True)
