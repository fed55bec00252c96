"""FSDP2's extension points with a tensor subclass that has no mask: what they keep, and why a mask needs more.

If this fails on a newer torch, the refusal of masked parameters (sharded_parameters.py) can be thought over.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial

from process_groups import Check

CHECKS: dict[str, Check] = {}


class Named(Tensor):
    """A wrapper around a tensor; every result of a call is one too."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Named:
        make: Any = Tensor._make_wrapper_subclass
        made: Named = make(cls, inner.shape, dtype=inner.dtype, strides=inner.stride(), device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*_each(unwrapped, args), **_each(unwrapped, kwargs or {}))
        return args[0] if func is torch.ops.aten.copy_.default else _each(wrapped, result)

    def fsdp_pre_all_gather(self, *args: Any) -> tuple[tuple[Tensor, ...], None]:
        return (self.inner,), None

    def fsdp_post_all_gather(self, outputs: Any, *args: Any, out: Any = None) -> Any:
        return None if out is not None else (Named(outputs[0]), outputs)


def unwrapped(value: Any) -> Any:
    return value.inner if isinstance(value, Named) else value


def wrapped(value: Any) -> Any:
    return Named(value) if type(value) is Tensor else value


def _each(function: Any, values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _each(function, value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return type(values)([_each(function, value) for value in values])
    return function(values)


def control(rank: int, ranks: int) -> None:
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(Named(layer.weight.detach()))
    sharded: Any = fully_shard(layer, mesh=init_device_mesh("cpu", (ranks,)))
    assert type(sharded.weight) is DTensor
    assert type(sharded.weight.to_local()) is Named
    result = sharded(torch.ones(2, 4))
    assert type(result) is Named
    result.sum().backward()
    # The gradient was summed in a plain buffer, for which there is no extension point: a mask of its own is lost there.
    assert type(sharded.weight.grad.to_local()) is Tensor
    # DTensor is outside: a mean is that of the ranks' means, whatever they are means of.
    assert sharded.weight.mean().placements == (Partial("avg"),)


CHECKS["FSDP2: what a tensor subclass keeps, and what not"] = control
