"""Support masked tensors in torch.distributed.tensor's functions that place tensors and modules.

A masked tensor is the outermost type, so `DTensor.from_local` and `distribute_tensor`, which return a DTensor, refuse
it and name the functions of distributed_tensors.py. The styles of `parallelize_module` place the inputs, outputs and
parameters of modules; here they place data and mask of masked ones alike.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from masked_dispatch.dispatch.run_rule import has_masked
from masked_dispatch.distributed.distributed_tensors import (
    alike,
    booleans_of,
    data_of,
    is_distributed,
    mask_of,
    together,
    with_booleans,
)
from masked_dispatch.distributed_internals import PREPARING, placing_module
from masked_dispatch.replacements import no_call, replace
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry import MaskedSemanticsError

# A module hook takes and returns one tensor or several.
Values: TypeAlias = Any
Hook = Callable[..., Values]


def is_of_masked(tensor: Tensor, *args: Any, **kwargs: Any) -> bool:
    """Return whether the call places a masked tensor."""
    return isinstance(tensor, MaskedTensor)


def refusing(name: str, instead: str) -> Callable[..., NoReturn]:
    """Return a replacement that refuses masked tensors, for a function that returns a DTensor."""

    def refuse(original: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> NoReturn:
        raise MaskedSemanticsError(
            f"{name} of a masked tensor of shape {tuple(tensor.shape)}: a masked tensor has to be the outermost "
            "type; inside a DTensor, its mask would be ignored when the ranks' parts are combined. Its data and "
            f"mask may be DTensors: masked_dispatch.distributed.{instead}(x, device_mesh, placements)."
        )

    return refuse


def place_parameter(distribute_tensor: Callable[..., Tensor], tensor: MaskedTensor, *args: Any, **kwargs: Any) -> Any:
    """Replace `distribute_tensor` where modules call it for their parameters and buffers."""
    if is_distributed(tensor):  # the style has placed it before its module's other parameters
        return tensor
    detached: Any = tensor.detach()
    torchs_own = inspect.unwrap(distribute_tensor)  # the refusing replacement, installed in another module, wraps it
    return alike(lambda part, _: torchs_own(part, *args, **kwargs), detached)


def has_masked_values(owner: Any, values: Values, *rest: Any) -> bool:
    """Return whether a hook or a style's method, which places its second argument, gets masked tensors."""
    return has_masked(values if isinstance(values, (list, tuple)) else [values])


def place_values(function: Hook, owner: Any, values: Values, *rest: Any) -> Values:
    """Call such a function on data and masks separately, and return masked results."""
    return placed(lambda chosen: function(owner, chosen, *rest), values)


def placing_values(function: Hook) -> Hook:
    """Wrap such a hook of a module, so that it accepts masked values too."""

    @functools.wraps(function)
    def called(owner: Any, values: Values, *rest: Any) -> Values:
        return place_values(function, owner, values, *rest)

    return called


def placed(function: Callable[[Values], Values], values: Values) -> Values:
    """Return a placing function's result, with masked tensors built from placed data and masks."""
    several = list(values) if isinstance(values, (list, tuple)) else [values]
    if not has_masked(several):
        return function(values)
    data, masks = function(_each(data_of, values)), function(_each(mask_of, values))
    count = max(len(booleans_of(value)) for value in several)
    booleans = [function(_each(functools.partial(_nth_boolean, n), values)) for n in range(count)]
    if not isinstance(data, (list, tuple)):
        return _masked_again(several[0], data, masks, booleans)
    each = [[placed[n] for placed in booleans] for n in range(len(data))]
    return tuple(_masked_again(*parts) for parts in zip(several, data, masks, each, strict=True))


def _nth_boolean(n: int, value: Tensor) -> Tensor:
    """Return a boolean that travels with a value; the mask of one that has fewer, because every call takes all."""
    booleans = booleans_of(value)
    return booleans[n] if n < len(booleans) else mask_of(value)


def _masked_again(value: Tensor, data: Tensor, mask: Tensor, booleans: Sequence[Tensor]) -> Tensor:
    """Return the placed data of a value under its placed mask, with what the value knows of its padding."""
    if not isinstance(value, MaskedTensor):
        return data
    result, extent = together(data, mask), value._extent
    if extent is None:
        return result
    divided = [dim for dim in extent.positions if data.shape[dim] != value.shape[dim]]
    if divided:
        raise MaskedSemanticsError(
            f"a parallel module places a tensor of shape {tuple(value.shape)} as one of shape {tuple(data.shape)}: "
            f"dimension {divided[0]} numbers the positions of its samples, which no part has whole. Divide another "
            "dimension; or pass x.without_extent(), in which padding counts as missing."
        )
    return with_booleans(result, extent, booleans[: len(booleans_of(value))])


def _each(chosen: Callable[[Tensor], Tensor], values: Values) -> Values:
    return type(values)(map(chosen, values)) if isinstance(values, (list, tuple)) else chosen(values)


def distribute_module(
    original: Callable[..., nn.Module],
    module: nn.Module,
    device_mesh: DeviceMesh,
    partition_fn: Any,
    input_fn: Hook,
    output_fn: Hook,
) -> nn.Module:
    """Call torch's function of this name, for styles, with hooks that place masked inputs and outputs too."""
    return original(module, device_mesh, partition_fn, placing_values(input_fn), placing_values(output_fn))


def install_refusals() -> None:
    """later_import.py calls this once, after the import of torch.distributed.tensor."""
    tensors: Any = importlib.import_module("torch.distributed.tensor")
    replace(tensors.DTensor, "from_local", refusing("DTensor.from_local", "from_local"), is_of_masked)
    replace(tensors, "distribute_tensor", refusing("distribute_tensor", "distribute"), is_of_masked)
    replace(placing_module(), "distribute_tensor", place_parameter, is_of_masked)


def install_styles() -> None:
    """later_import.py calls this once, after the import of torch.distributed.tensor.parallel's styles."""
    styles: Any = importlib.import_module("torch.distributed.tensor.parallel.style")
    replace(styles, "distribute_tensor", place_parameter, is_of_masked)
    replace(styles, "distribute_module", distribute_module, no_call, always=True)
    for owner, name in PREPARING:
        replace(getattr(styles, owner), name, place_values, has_masked_values)
