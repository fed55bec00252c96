"""The private parts of torchax that masked tensors need, and what is assumed of them.

Each assumption has a test of the same number in tests/helpers/assumptions_about_torchax.py:

 1. a torchax tensor, and a view of one, is a wrapper: torch's C++ takes it to be on meta, its `device` is jax:0
 2. two modes see each call before any subclass: ``XLAFunctionMode.__torch_function__`` and
    ``XLADispatchMode.__torch_dispatch__``, which Python looks up in their classes
 3. operators of torchax tensors run under the dispatch mode of an environment, which can be entered again where torch
    has switched it off: inside ``__torch_dispatch__``
 4. a torchax tensor holds its values as an array of jax, which an operator in place replaces; views that operators make
    are copies
 5. a tensor that goes into a function of jax, or comes out, is a leaf of jax's pytrees, and what is no array stays what
    it is
 6. its lowerings are in a table, by operator; that of slice_scatter, which differentiates a slice, takes a negative
    dimension for none (`mend_slice_scatter`)
 7. the lowerings of two operators return two of four results, and torch's C++ reads on behind them (`refuse_short`)
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

# The release that all this was checked with, which the extra pins.
CHECKED = "0.0.14.dev20261026"

# Where torch's C++ takes torchax tensors to be.
DEVICE_IN_CPP = torch.device("meta")


def import_torchax() -> ModuleType:
    """torchax; ImportError that names the extra if it, or jax, is missing, and a warning about another release."""
    try:
        import torchax
        import torchax.interop
    except ImportError as error:
        raise ImportError(
            f"masked tensors on XLA need torchax and jax, and one of them cannot be imported ({error}): pip install "
            "'masked-dispatch[xla]'"
        ) from error
    version = importlib.metadata.version("torchax")
    if version != CHECKED:
        warnings.warn(
            f"masked_dispatch.torchax was checked with torchax {CHECKED}, and this is {version}: run the tests of "
            f"tests/torchax with it, or install the checked version, pip install 'torchax=={CHECKED}'",
            stacklevel=3,
        )
    return torchax


def tensor_types(torchax: ModuleType) -> tuple[type, ...]:
    """The types of torchax's tensors."""
    return torchax.tensor.Tensor, torchax.view.View


# From the arguments of a call: the context in which torch serves it; None where torchax does.
Claim = Callable[[Sequence[object]], contextlib.AbstractContextManager[Any] | None]


def serve_modes(torchax: ModuleType, claim: Claim, move: Callable[..., Any]) -> None:
    """Let torchax's modes leave calls to torch, those that `claim` gives a context.

    Of these, ``x.to(…)`` (and ``x.cpu()``) is `move(to, x, …)`, where `to` moves a plain tensor as torchax does.
    """
    modes = torchax.tensor
    for mode, name in ((modes.XLAFunctionMode, "__torch_function__"), (modes.XLADispatchMode, "__torch_dispatch__")):
        setattr(mode, name, _serving(getattr(mode, name), claim, move))


def _serving(served: Callable[..., Any], claim: Claim, move: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(served)
    def mode(self: object, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        claimed = claim((*args, *kwargs.values()))
        if claimed is None:
            return served(self, func, types, args, kwargs)
        if func is torch.Tensor.cpu:
            func, args, kwargs = torch.Tensor.to, (args[0], "cpu"), {}
        if func is torch.Tensor.to:
            return move(lambda tensor, *to, **named: served(self, func, types, (tensor, *to), named), *args, **kwargs)
        with claimed:
            return func(*args, **kwargs)

    return mode


def mend_slice_scatter(torchax: ModuleType) -> None:
    """Let torchax's slice_scatter, and with it the gradient of a slice, count dimensions from the end."""
    importlib.import_module("torchax.ops.jaten")  # where its lowerings register themselves
    lowering = torchax.ops.ops_registry.all_aten_ops[torch.ops.aten.slice_scatter]
    scatter = lowering.func

    @functools.wraps(scatter)
    def from_either_end(target: Any, source: Any, dim: int = 0, *rest: Any, **named: Any) -> Any:
        return scatter(target, source, dim % target.ndim, *rest, **named)

    lowering.func = from_either_end


def refuse_short(torchax: ModuleType) -> None:
    """Let torchax lack the operators of which it returns too few results: reading the others may end the process."""
    importlib.import_module("torchax.ops.jaten")
    for op in (torch.ops.aten._linalg_slogdet, torch.ops.aten._linalg_solve_ex):

        def refuse(*_: Any, op: Any = op, **__: Any) -> Any:
            raise torchax.tensor.OperatorNotFound(f"torchax's lowering of {op} returns too few results")

        torchax.ops.ops_registry.all_aten_ops[op].func = refuse


def operators_of(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """A context in which torch's operators compute on torchax tensors like this one."""
    return tensor._env._dispatch_mode  # type: ignore[attr-defined]


def has_array(tensor: Tensor) -> bool:
    """Whether a torchax tensor has values that can be read: not while jax traces."""
    from jax.core import Tracer

    return not isinstance(tensor.jax(), Tracer)  # type: ignore[attr-defined]


def to_cpu(tensor: Tensor) -> Tensor:
    """The values of a torchax tensor as a tensor of torch's own, in memory of its own: that of jax must not change."""
    return tensor._env.j2t_copy(tensor.jax()).clone()  # type: ignore[attr-defined]
