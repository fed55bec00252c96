"""Methods of masked tensors that say where `skipna` and `min_count` are: in this library's functions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from masked_dispatch.api import reductions
from masked_dispatch.compiler_internals import never_compiled
from masked_dispatch.engine_internals import delegating
from masked_dispatch.tensor.masked_tensor import MaskedTensor


def naming_the_function(name: str, options: tuple[str, ...]) -> Callable[..., Any]:
    """torch's method, which names the library's function if it is given one of its options."""
    method: Callable[..., Any] = getattr(torch.Tensor, name)

    @delegating  # so that rules inside a Python function see who called the method
    @functools.wraps(method)
    @never_compiled
    def reduced(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            for option in options:
                if option in kwargs:
                    raise TypeError(
                        f"x.{name}() is torch's method and has no {option}; use masked_dispatch.{name}(x, ..., "
                        f"{option}={kwargs[option]!r})"
                    )
        return method(self, *args, **kwargs)

    return reduced


def install() -> None:
    """Called once, when the package is imported."""
    for name, function in vars(reductions).items():
        if hasattr(torch.Tensor, name) and inspect.isfunction(function):
            options = tuple(o for o in ("skipna", "min_count") if o in inspect.signature(function).parameters)
            if options:
                setattr(MaskedTensor, name, naming_the_function(name, options))
