"""torch.distributed.tensor's functions that place tensors and modules, for masked tensors.

A masked tensor is the outermost type, so `DTensor.from_local` and `distribute_tensor`, which make a DTensor, refuse it
and name the functions of distributed_tensors.py. The styles of `parallelize_module` place the inputs, outputs and
parameters of modules; theirs are placed masked, data and mask alike.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from masked_dispatch.dispatch.run_rule import has_masked
from masked_dispatch.distributed.distributed_tensors import alike, data_of, is_distributed, mask_of, together
from masked_dispatch.distributed_internals import replace_placing_of_parameters, replace_preparations
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry import MaskedSemanticsError

# What a hook of a module gets or returns: a tensor, or several.
Values: TypeAlias = Any
Hook = Callable[..., Values]


def refusing(function: Callable[..., Any], name: str, instead: str) -> Callable[..., Any]:
    """A function that makes a DTensor of a tensor, which refuses masked ones."""

    @functools.wraps(function)
    def called(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, MaskedTensor):
            raise MaskedSemanticsError(
                f"{name} of a masked tensor of shape {tuple(tensor.shape)}: a masked tensor is the outermost type, and "
                "inside of a DTensor its mask would be unknown to what combines the ranks' parts. Its data and mask "
                f"may be DTensors: masked_dispatch.distributed.{instead}(x, device_mesh, placements)."
            )
        return function(tensor, *args, **kwargs)

    return called


def placing(function: Callable[..., Any]) -> Callable[..., Any]:
    """`distribute_tensor` as modules call it for their parameters and buffers."""

    @functools.wraps(function)
    def called(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(tensor, MaskedTensor):
            return function(tensor, *args, **kwargs)
        if is_distributed(tensor):  # by the style, before its module's other parameters
            return tensor
        detached: Any = tensor.detach()
        return alike(lambda part: function(part, *args, **kwargs), detached)

    return called


def placing_values(function: Hook) -> Hook:
    """A function that places its second argument: a hook of a module, or the method of a style; the rest is its own."""

    @functools.wraps(function)
    def called(owner: Any, values: Values, *rest: Any) -> Values:
        return placed(lambda chosen: function(owner, chosen, *rest), values)

    return called


def placed(function: Callable[[Values], Values], values: Values) -> Values:
    """What a function that places values gives: the first of them, or each."""
    several = list(values) if isinstance(values, (list, tuple)) else [values]
    if not has_masked(several):
        return function(values)
    data, masks = function(_each(data_of, values)), function(_each(mask_of, values))
    if not isinstance(data, (list, tuple)):
        return together(data, masks) if isinstance(several[0], MaskedTensor) else data
    triples = zip(several, data, masks, strict=True)
    return tuple(together(d, m) if isinstance(value, MaskedTensor) else d for value, d, m in triples)


def _each(chosen: Callable[[Tensor], Tensor], values: Values) -> Values:
    return type(values)(map(chosen, values)) if isinstance(values, (list, tuple)) else chosen(values)


def distributing(distribute_module: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """`distribute_module` as styles call it: with hooks that place masked inputs and outputs too."""

    @functools.wraps(distribute_module)
    def called(
        module: nn.Module, device_mesh: DeviceMesh, partition_fn: Any, input_fn: Hook, output_fn: Hook
    ) -> nn.Module:
        return distribute_module(module, device_mesh, partition_fn, placing_values(input_fn), placing_values(output_fn))

    return called


def install_refusals() -> None:
    """Called once, when torch.distributed.tensor has been imported."""
    tensors: Any = importlib.import_module("torch.distributed.tensor")
    tensors.DTensor.from_local = staticmethod(refusing(tensors.DTensor.from_local, "DTensor.from_local", "from_local"))
    replace_placing_of_parameters(placing(tensors.distribute_tensor))
    tensors.distribute_tensor = refusing(tensors.distribute_tensor, "distribute_tensor", "distribute")


def install_styles() -> None:
    """Called once, when the styles of torch.distributed.tensor.parallel have been imported."""
    styles: Any = importlib.import_module("torch.distributed.tensor.parallel.style")
    styles.distribute_tensor = placing(inspect.unwrap(styles.distribute_tensor))
    styles.distribute_module = distributing(styles.distribute_module)
    replace_preparations(placing_values)
