"""Which operators of aten there are, and which are called."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from masked_dispatch.torch_internals import aten_names, overload_named


def aten_overloads() -> Iterator[OpOverload]:
    """Every aten overload that takes a tensor."""
    return map(overload_named, aten_names())


class Calls(TorchDispatchMode):
    """The operators that are called inside, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[OpOverload] = []

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))
