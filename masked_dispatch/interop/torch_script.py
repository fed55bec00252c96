"""Calls of TorchScript functions and modules with masked tensors.

TorchScript interprets a graph without calling the original Python function, so replacements of Python functions would
not apply. After some calls, it also differentiates by formulas for plain tensors, which divide by sizes. This library
therefore runs the original Python function on masked tensors. For modules and loaded files, which have no such
function, it refuses the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from masked_dispatch.replacements.replacing import replace
from masked_dispatch.tensor.checks import contains_masked
from masked_dispatch.torch_internals import TORCHSCRIPT_CALLABLES, python_function_of
from op_registry import MaskedSemanticsError


def call_python(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the Python function that TorchScript compiled."""
    function = python_function_of(self)
    if function is None:
        raise MaskedSemanticsError(
            f"{self.name} of a TorchScript module is called with a masked tensor. TorchScript differentiates by the "
            "formulas of plain tensors, which divide by sizes, not by the number of valid elements. Call the Python "
            "module that was compiled, or torch.compile it; or pass x.to_tensor(fill), and put the mask on the result: "
            "as_masked_tensor(y, mask)."
        )
    return function(*args, **kwargs)


def install() -> None:
    """The package calls this once, on import."""
    for kind in TORCHSCRIPT_CALLABLES:
        replace(kind, "__call__", call_python, lambda self, *args, **kwargs: contains_masked((args, kwargs)))
