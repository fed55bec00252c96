"""Error texts that several functions raise, or that take computing; all others stand where they are raised.

Each says what is wrong, with which values, and what to do next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._ops import OpOverload

from masked_dispatch.torch_internals import schema_of
from op_registry.registration import writes


def written_through_view(target: Any) -> str:
    """For a write through a view that would change which positions of the base are there."""
    return (
        f"what is written to a view of shape {tuple(target.shape)} has other positions than the view, and its base "
        "cannot learn of them through it. Write into the tensor itself, x[index] = value; join steps with torch.stack; "
        "or write value.without_extent()."
    )


def leaves_out_positions(view: Any) -> bool:
    """Whether a view whose mask is a copy is one like x[:, a:-b] of samples, and not one of another dtype."""
    base = view._base
    padded = any(getattr(tensor, "_extent", None) is not None for tensor in (view, base))
    return padded and (base is None or base.dtype is view.dtype)


def with_copied_mask(view: Any) -> str:
    """For whatever cannot use a view whose mask is a copy: what the view is."""
    if leaves_out_positions(view):
        return (
            f"a view (shape {tuple(view.shape)}) that leaves out positions at each sample's end, whose mask is a copy"
        )
    return f"a view of another dtype ({view.dtype}, shape {tuple(view.shape)}), whose mask is a copy"


def extent_not_carried(tensor: Tensor, how: str) -> str:
    """For whatever would lose which positions of a padded batch are there."""
    return (
        f"a masked tensor of shape {tuple(tensor.shape)} knows which of its positions are there, and {how} does not "
        "carry that yet. Pass x.without_extent(), in which padding counts as missing, and say again what is there with "
        "masked_dispatch.padded."
    )


def no_such_name(
    module: str,
    name: str,
    words: Mapping[str, str] | None = None,
    names: Iterable[str] = (),
    elsewhere: str | None = None,
) -> NoReturn:
    """Raise the AttributeError of a public module for a name that it lacks.

    words      for names of other libraries: the code to write here
    names      the module's own names; the error for any other name lists them
    elsewhere  where a function with this name is
    """
    if words is not None and name in words:
        instead = f"; here it is written {words[name]}"
    elif elsewhere is not None:
        instead = f"; {elsewhere}"
    else:
        instead = f"; it has {', '.join(names)}" if names else ""
    raise AttributeError(f"module {module!r} has no attribute {name!r}{instead}", name=name)


_IF_POSITIONS = "\n    # of results that are positions in the slice: dims=op_registry.authoring.Slices(positions=(0,))"


def likely_category(op: OpOverload) -> tuple[str, str]:
    """The category an operator most likely belongs to, and the line that would register it."""
    name = str(op).replace(".default", "")
    if torch.Tag.pointwise in op.tags:
        return "elementwise", f"op_registry.authoring.elementwise(torch.ops.{name})"
    schema = schema_of(op)
    arguments = {a.name for a in schema.arguments}
    tensors = sum(str(a.type) in ("Tensor", "Optional[Tensor]") for a in schema.arguments)
    if torch.Tag.reduction in op.tags or {"dim", "keepdim"} <= arguments:
        return "reduction", f"op_registry.authoring.reduction(torch.ops.{name}, identity=0){_IF_POSITIONS}"
    if "dim" in arguments and tensors == 1:
        return "reduction, if it gives one number for each slice, or scan, if one for each element", (
            f"op_registry.authoring.reduction(torch.ops.{name}, identity=0)  # or scan(...); 0, if a 0 changes nothing"
            f"{_IF_POSITIONS}"
        )
    by_element = f"op_registry.authoring.elementwise(torch.ops.{name})"
    if tensors == 1 and len(arguments) == 1:
        return "elementwise", by_element
    function = (
        f"@op_registry.authoring.masked_rule(torch.ops.{name}, category=...)\n"
        f"    def {schema.name.partition('::')[2]}({', '.join(a.name for a in schema.arguments)}): ..."
    )
    if tensors == len(arguments):
        either = "elementwise, if it computes each element from one element of each tensor; else a function of its own"
        return either, f"{by_element}  # or\n    {function}"
    return "a function of its own", function


def no_rule(op: OpOverload, called_with: str) -> str:
    """Why an operator without a rule is refused, and the alternatives."""
    if schema_of(op).is_mutable:
        advice = writes(op)
    elif op.namespace == "aten" and schema_of(op).name.endswith("_backward"):
        advice = "one of torch's gradient formulas; torch.autograd.grad differentiates the masked operator itself"
    else:
        category, line = likely_category(op)
        advice = f"likely category: {category}; to register it:\n    {line}"
    return (
        f"{op} has no masked meaning: no rule is registered for it and torch has no decomposition of it.\n"
        f"  called with: {called_with or 'masked tensors'}\n"
        f"  {advice}\n"
        "  or fill first, if invalid elements may take a value: x.to_tensor(value)"
    )


def passed_to_torch_func(tensor: Tensor) -> str:
    """Why a masked tensor may not be passed to a torch.func transform directly."""
    return (
        f"a masked tensor of shape {tuple(tensor.shape)} was passed to a transform of torch.func (vmap, grad, jvp ...; "
        "associative_scan runs one), which wraps it without its mask: derivatives would be those of the plain "
        "operators. Use the transform of the same name from masked_dispatch.functional, or pass x.get_data() and "
        "x.get_mask() and mask inside."
    )


def returned_to_torch_func(tensor: Tensor) -> str:
    """Why a masked tensor may not leave a transform of torch.func."""
    return (
        f"a masked tensor of shape {tuple(tensor.shape)} that was made inside a transform of torch.func (vmap, grad, "
        "jvp ...) leaves it; torch.func would return silent zeros, or a dead tensor. Use the transform of the same "
        "name from masked_dispatch.functional, or return x.to_tensor(fill) (and x.get_mask())."
    )


def tangent_stored_otherwise(gradient: Tensor) -> str:
    """Why the gradient of a compiled region's sparse result must have the layout of the result."""
    kind = f"one stored as {gradient.storage_layout}" if hasattr(gradient, "storage_layout") else "a plain tensor"
    return (
        "a compiled function returned a sparsely stored masked tensor, and its gradient, of shape "
        f"{tuple(gradient.shape)}, is {kind}: the graph takes gradients in the layout of its results. If you passed "
        "it to backward(), pass grad.mask_like(y). If the loss does not depend on the result, return y.detach(), or "
        "do not return it."
    )


def called_on_memory(tensor: Tensor, method: str) -> str:
    """Why apply_(), map_() and map2_() do not call a Python function on the elements of a masked tensor."""
    return (
        f"x.{method}() calls a Python function on every element in memory, but the invalid elements of a masked "
        f"tensor, here of shape {tuple(tensor.shape)}, must not be read. Write the function in torch operators; or "
        f"call it on plain data and mask the result: as_masked_tensor(x.to_tensor(fill).{method}(...), x.get_mask())."
    )
