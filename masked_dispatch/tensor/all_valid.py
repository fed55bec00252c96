"""Leaving PyTorch: NumPy arrays and lists have no place for a mask, so every element has to be valid."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from masked_dispatch.compiler_internals import never_compiled
from masked_dispatch.tensor.code_version import code_version
from op_registry import InvalidValueError


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
