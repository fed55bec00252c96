"""Methods of torch.Tensor that ask for one piece of memory, of which a masked tensor has none: refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from torch import Tensor

from masked_dispatch.tensor.messages import called_on_memory, data_pointer_requested, memory_requested
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
