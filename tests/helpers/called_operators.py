"""Which operators are called."""

from __future__ import annotations

from typing import Any

from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    """The operators that are called inside, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[OpOverload] = []

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))
