"""Functions and modules compiled by TorchScript, called with masked tensors.

TorchScript interprets a graph: no Python function calls its operators, so that rules inside a function would not hold,
and after some calls it differentiates by formulas of plain tensors, which divide by sizes. So with a masked tensor the
Python function that was compiled is run in its place. Where there is none, a module or a loaded file, the call is
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from masked_dispatch.replacements.replacing import replace
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.messages import run_by_torchscript
from masked_dispatch.torch_internals import TORCHSCRIPT_CALLABLES, python_function_of
from op_registry import MaskedSemanticsError


def contains_masked(value: object) -> bool:
    """Whether an argument is a masked tensor, or a list, tuple or dict that contains one."""
    if isinstance(value, dict):
        return any(map(contains_masked, value.values()))
    return isinstance(value, MaskedTensor) or (isinstance(value, (list, tuple)) and any(map(contains_masked, value)))


def call_python(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the Python function that TorchScript has compiled."""
    function = python_function_of(self)
    if function is None:
        raise MaskedSemanticsError(run_by_torchscript(self.name))
    return function(*args, **kwargs)


def install() -> None:
    """Called once, when the package is imported."""
    for kind in TORCHSCRIPT_CALLABLES:
        replace(kind, "__call__", call_python, lambda self, *args, **kwargs: contains_masked((args, kwargs)))
