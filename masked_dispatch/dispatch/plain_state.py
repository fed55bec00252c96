"""Replace masked parameters and buffers of a module by plain ones, so that torch.export can save its program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from masked_dispatch.interop.crossing import as_masked, filled
from masked_dispatch.tensor.masked_tensor import MaskedTensor


def split_masked_state(module: nn.Module, save_all: bool = False) -> nn.Module:
    """Replace masked parameters and buffers of `module` and its children by plain ones, in place; returns the module.

    A masked `w` becomes a parameter (or buffer) `w_data`, 0 where invalid, and a buffer `w_mask`; each read of `w` then
    computes it from the two. This also replaces masked tensors that are other attributes, and stores a tensor that
    several modules share once.

    save_all  whether state_dict() from now on includes buffers that it left out
    """
    parts: dict[int, tuple[Tensor, Tensor]] = {}
    for owner in module.modules():
        _split(owner, parts, save_all)
    return module


def _split(owner: nn.Module, parts: dict[int, tuple[Tensor, Tensor]], save_all: bool) -> None:
    reads: dict[str, property] = {}
    for holder in (owner._parameters, owner._buffers, vars(owner)):
        for name, value in list(holder.items()):
            if not isinstance(value, MaskedTensor):
                continue
            if id(value) not in parts:
                parts[id(value)] = _parts_of(value, is_parameter=holder is owner._parameters)
            data, mask = parts[id(value)]
            transient = holder is vars(owner) or name in owner._non_persistent_buffers_set
            persistent = save_all or not transient
            del holder[name]
            if isinstance(data, nn.Parameter):
                owner.register_parameter(f"{name}_data", data)
            else:
                owner.register_buffer(f"{name}_data", data, persistent)
            owner.register_buffer(f"{name}_mask", mask, persistent)
            reads[name] = property(_masked_again(name))
    if reads:
        owner.__class__ = type(type(owner).__name__, (type(owner),), {**reads, "__module__": type(owner).__module__})


def _parts_of(tensor: MaskedTensor, is_parameter: bool) -> tuple[Tensor, Tensor]:
    """The data, 0 where invalid, as a leaf of the same kind, and the mask."""
    data = filled(tensor).detach()
    if is_parameter:
        data = nn.Parameter(data, tensor.requires_grad)
    return data, tensor.get_mask()


def _masked_again(name: str) -> Callable[[Any], Tensor]:
    data_name, mask_name = f"{name}_data", f"{name}_mask"

    def read(self: Any) -> Tensor:
        return as_masked(getattr(self, data_name), getattr(self, mask_name))

    return read
