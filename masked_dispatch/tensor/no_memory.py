"""Methods of torch.Tensor that need a single block of memory: a masked tensor has none, and refuses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor

from masked_dispatch.replacements import no_call, replace
from masked_dispatch.tensor.messages import called_on_memory
from op_registry import MaskedSemanticsError


class WithoutMemory(Tensor):
    """A tensor whose values and mask are other tensors."""

    def data_ptr(self) -> NoReturn:
        raise MaskedSemanticsError(
            f"a masked tensor of shape {tuple(self.shape)} has no single address: it is data and a mask. "
            "Use x.get_data().data_ptr(), or x.to_tensor(fill).data_ptr()."
        )

    def storage(self) -> NoReturn:
        raise MaskedSemanticsError(
            f"a masked tensor of shape {tuple(self.shape)} has no memory of its own: it is data and a mask. torch.save "
            "keeps both. A file format of plain tensors, such as safetensors, takes x.to_tensor(fill) and x.get_mask() "
            "under two names, and as_masked_tensor(data, mask) puts them together again. For the memory itself use "
            "x.get_data().storage()."
        )

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
            return (
                f"[torch.storage.UntypedStorage(device={storage.device}) of size {storage.nbytes()}, without memory of "
                "its own: the values of a masked tensor lie in x.get_data().untyped_storage()]"
            )

    replace(torch.UntypedStorage, "__repr__", shown, no_call, always=True)
