"""MaskedTensor as op_registry's conformance sees it: eager, compiled, and compiled down to kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from masked_dispatch import is_masked_tensor, masked_tensor
from op_registry.conformance.subject import Subject


class Eager(Subject):
    """MaskedTensor, called as a user calls it."""

    name = "eager"

    def wrap(self, data: Tensor, mask: Tensor | None, requires_grad: bool = False) -> Any:
        return masked_tensor(data, mask, requires_grad=requires_grad)

    def observe(self, value: Any) -> tuple[Tensor, Tensor | None]:
        if not is_masked_tensor(value):
            return value, None
        return value.get_data(), value.get_mask()

    def modes(self) -> dict[str, Subject]:
        return {"aot_eager": Compiled("aot_eager"), "inductor": Compiled("inductor")}


class Compiled(Eager):
    """The same through torch.compile(fullgraph=True)."""

    def __init__(self, backend: str) -> None:
        self.name = backend
        self.backend = backend

    def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        torch.compiler.reset()

        def called(*given: Any, **named: Any) -> Any:
            return fn(*given, **named)

        return torch.compile(called, backend=self.backend, fullgraph=True)(*args, **kwargs)

    def modes(self) -> dict[str, Subject]:
        return {}


eager = Eager()
aot_eager = Compiled("aot_eager")
inductor = Compiled("inductor")
