"""Kernels of operators that the autograd engine itself also calls, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from masked_dispatch.autograd.dense import plain_gradient
from masked_dispatch.autograd.engine import needs_plain_gradient
from masked_dispatch.autograd.reached import carry_nothing
from masked_dispatch.dispatch.run_rule import Kernel
from masked_dispatch.engine_internals import called_by_engine, delegating, engine_run
from masked_dispatch.torch_internals import DispatchKeySet

aten = torch.ops.aten


def gradient_storing_kernel(kernel: Kernel, store: Callable[..., Tensor]) -> Kernel:
    """The kernel of an operator that the engine also calls to make a `.grad` from a gradient; `store` does that."""

    @delegating
    def storing_or(keyset: DispatchKeySet, x: Any, *args: Any, **kwargs: Any) -> Any:
        if needs_plain_gradient(x, 1):
            return store(x, *args, **kwargs)
        return kernel(keyset, x, *args, **kwargs)

    return storing_or


def _copy_for_plain_leaf(grad: Tensor, *, memory_format: torch.memory_format | None = None) -> Tensor:
    return plain_gradient(grad, None).clone(memory_format=memory_format or torch.preserve_format)


def _zeros_for_plain_leaf(grad: Tensor, size: list[int], stride: list[int], **options: Any) -> Tensor:
    """Memory into which the engine then copies the gradient: an update, so that invalid elements stay zero."""
    options["device"] = options.get("device") or grad.device
    options["dtype"] = options.get("dtype") or grad.dtype
    return torch.empty_strided(size, stride, **options).zero_()


# Besides `detach`, the engine calls these to make a `.grad` from a gradient (torch's accumulate_grad.h).
_STORING_GRADIENTS: dict[OpOverload, Callable[..., Tensor]] = {
    aten.clone.default: _copy_for_plain_leaf,
    aten.new_empty_strided.default: _zeros_for_plain_leaf,
}


def kernel_of_zeros(kernel: Kernel) -> Kernel:
    """The kernel of `zeros_like`, with which the engine also makes the gradient of what `copy_` has overwritten."""

    @delegating
    def zeros(keyset: DispatchKeySet, x: Any, *args: Any, **kwargs: Any) -> Any:
        made = kernel(keyset, x, *args, **kwargs)
        return carry_nothing(made) if engine_run() >= 0 and called_by_engine(1) else made

    return zeros


def called_with_gradients(op: OpOverload, kernel: Kernel) -> Kernel:
    """The kernel of an operator, if the engine calls it too: one that does what the engine needs."""
    if op is aten.zeros_like.default:
        return kernel_of_zeros(kernel)
    store = _STORING_GRADIENTS.get(op)
    return kernel if store is None else gradient_storing_kernel(kernel, store)
