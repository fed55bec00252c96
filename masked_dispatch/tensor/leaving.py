"""Methods that leave PyTorch, or need a single block of memory, which a masked tensor does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from masked_dispatch.compiler_internals import never_compiled
from masked_dispatch.replacements import no_call, replace
from masked_dispatch.tensor.messages import called_on_memory
from masked_dispatch.tensor.traced import code_version
from op_registry import InvalidValueError, MaskedSemanticsError

# ---------------------------------------------------------------------- NumPy arrays and lists have no place for a mask


class ReadWhereAllValid(Tensor):
    """Methods of torch.Tensor that return something other than tensors."""

    @never_compiled
    def numpy(self, *, force: bool = False) -> Any:
        """The values as a NumPy array, if every element is valid; raises :class:`InvalidValueError` otherwise."""
        return self._all_valid_data("numpy()").numpy(force=force)

    @never_compiled
    def __array__(self, dtype: object = None, copy: bool | None = None) -> Any:
        array: Any = self._all_valid_data("np.asarray()").numpy()
        return array.astype(dtype or array.dtype, copy=bool(copy))

    @never_compiled
    def __array_wrap__(self, array: Any, context: object = None, return_scalar: bool = False) -> Any:
        """Wrap the result of a NumPy ufunc, as of ``x + array``: all valid, because the ufunc has read the values."""
        return torch.ops.masked_dispatch.as_masked_tensor(torch.as_tensor(array), None, code_version())

    @never_compiled
    def tolist(self) -> Any:
        """The values as nested lists, if every element is valid; raises :class:`InvalidValueError` otherwise."""
        return self._all_valid_data("tolist()").tolist()

    def _all_valid_data(self, method: str) -> Tensor:
        invalid = self.numel() - int(torch.ops.masked_dispatch.count(self, None, False))
        if invalid:
            operators = " An operator with an array, x + array, asks for it too: write x + torch.as_tensor(array)."
            raise InvalidValueError(
                f"{method} of a masked tensor of shape {tuple(self.shape)} with {invalid} invalid elements, which have "
                "no values. Choose their value with x.to_tensor(fill), or keep the mask: x.to_numpy(), a masked array "
                "of NumPy, which matplotlib draws with gaps; or masked_dispatch.interop.to_numpy_masked(x, "
                f"fill_value), to_pandas(x) or to_arrow(x).{operators if method == 'np.asarray()' else ''}"
            )
        return torch.ops.masked_dispatch.get_data(self)


# -------------------------------------------------------------------------------------------------------------- refused


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


def install_refusals() -> None:
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
