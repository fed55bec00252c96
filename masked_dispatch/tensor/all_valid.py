"""Leaving PyTorch: NumPy arrays and lists have no place for a mask, so every element has to be valid."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from masked_dispatch.compiler_internals import never_compiled
from masked_dispatch.tensor.code_version import code_version
from masked_dispatch.tensor.messages import invalid_elements_exported
from op_registry import InvalidValueError

if TYPE_CHECKING:
    _Base = Tensor
else:
    _Base = object


class ReadWhereAllValid(_Base):
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
            raise InvalidValueError(invalid_elements_exported(self, method, invalid))
        return torch.ops.masked_dispatch.get_data(self)
