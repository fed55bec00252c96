"""Masked tensors made inside a functorch transform: they carry the transform and end with it."""

from __future__ import annotations

import torch
from torch import Tensor

from masked_dispatch.compiler_internals import never_compiled
from masked_dispatch.engine_internals import called_by_functorch
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.messages import returned_to_torch_func
from masked_dispatch.torch_internals import PRE_DISPATCH, make_wrapper_subclass, outlived_transform
from op_registry import MaskedSemanticsError


class InTransform(MaskedTensor):
    """A masked tensor made inside a functorch transform: its inner tensors carry the transform, and it ends with it.

    torch.func would take a result for one without derivatives and silently return zeros, so its query raises.
    """

    _carries_transform = True

    @property
    def _inner(self) -> tuple[Tensor | None, ...]:
        return self._data, self._validity

    def detach(self) -> MaskedTensor:
        return torch.ops.masked_dispatch.detach(self)

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        if called_by_functorch(1):
            raise MaskedSemanticsError(returned_to_torch_func(self))
        return bool(torch.Tensor.requires_grad.__get__(self))  # type: ignore[attr-defined]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        torch.Tensor.requires_grad.__set__(self, value)  # type: ignore[attr-defined]

    @never_compiled
    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        check_alive(self)
        return super().__repr__()


def check_alive(tensor: InTransform) -> None:
    """Refuse a tensor that has outlived the transform it was made in."""
    if any(inner is not None and outlived_transform(inner) for inner in tensor._inner):
        raise MaskedSemanticsError(returned_to_torch_func(tensor))


def wrap_in_transform(data: Tensor, validity: Tensor | None) -> InTransform:
    """A masked tensor around `data` and `validity`, which carry a functorch transform (nothing is checked)."""
    wrapper: InTransform = make_wrapper_subclass(
        InTransform,
        data.shape,
        strides=data.stride(),
        dtype=data.dtype,
        device=data.device,
        _extra_dispatch_keys=PRE_DISPATCH,
    )
    wrapper._data = data
    wrapper._stored_validity = validity
    return wrapper
