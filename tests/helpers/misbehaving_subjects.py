"""Subjects that misbehave, for the tests of what runs in worker processes, and of how laws see it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from masked_dispatch.conformance_subject import Eager
from op_registry.conformance.subject import Records


class DiesOfSines(Records):
    """Takes its process down when it meets a sine, and does not come back from a tangent."""

    name = "dies of sines"

    def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        name = getattr(fn, "__name__", "")
        if name == "sin":
            os._exit(139)
        if name == "tan":
            time.sleep(60)
        return super().call(fn, *args, **kwargs)


class DiesOfIntegers(Eager):
    """Takes its process down when it wraps integers, and does not come back from wrapping bools."""

    name = "dies of integers"

    def wrap(self, data: Tensor, mask: Tensor | None, requires_grad: bool = False) -> Any:
        if data.dtype is torch.int64:
            os._exit(139)
        if data.dtype is torch.bool:
            time.sleep(60)
        return super().wrap(data, mask, requires_grad)


class ForgetsOwnExtents(Eager):
    """Drops an extent that says what the mask says, but is another tensor."""

    name = "forgets own extents"

    def padded(
        self,
        data: Tensor,
        mask: Tensor | None,
        there: Tensor,
        samples: int,
        positions: int | list[int],
        requires_grad: bool = False,
    ) -> Any:
        if mask is not None and torch.equal(mask, there.expand(data.shape)):
            return super().wrap(data, mask, requires_grad)
        return super().padded(data, mask, there, samples, positions, requires_grad)


dies_of_sines = DiesOfSines()
dies_of_integers = DiesOfIntegers()
forgets_own_extents = ForgetsOwnExtents()
