"""Error texts that say what, with which values, and what to do next."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload


def likely_category(op: OpOverload) -> tuple[str, str]:
    """The category that an operator most likely belongs to, and the line that would register it."""
    name = str(op).replace(".default", "")
    if torch.Tag.pointwise in op.tags:
        return "elementwise", f"op_registry.authoring.elementwise(torch.ops.{name})"
    arguments = {a.name for a in op._schema.arguments}
    tensors = sum(str(a.type) in ("Tensor", "Optional[Tensor]") for a in op._schema.arguments)
    if torch.Tag.reduction in op.tags or {"dim", "keepdim"} <= arguments:
        return "reduction", f"op_registry.authoring.reduction(torch.ops.{name}, identity=0)"
    if "dim" in arguments and tensors == 1:
        return "scan", f"op_registry.authoring.scan(torch.ops.{name}, identity=0)"
    if tensors == 1 and len(arguments) == 1:
        return "elementwise", f"op_registry.authoring.elementwise(torch.ops.{name})"
    return "a function of its own", (
        f"@op_registry.authoring.masked_rule(torch.ops.{name}, category=…)\n"
        f"    def {op._schema.name.partition('::')[2]}({', '.join(a.name for a in op._schema.arguments)}): ..."
    )


def no_rule(op: OpOverload, called_with: str) -> str:
    """Why an operator without a rule is refused, and the ways out."""
    category, line = likely_category(op)
    return (
        f"{op} has no masked meaning: no rule is registered for it and torch has no decomposition of it.\n"
        f"  called with: {called_with or 'masked tensors'}\n"
        f"  likely category: {category}; to register it:\n    {line}\n"
        "  or fill first, where invalid elements may take a value: x.to_tensor(value)"
    )


def handed_to_torch_func(tensor: Tensor) -> str:
    """Why a transform of torch.func may not be given a masked tensor directly."""
    return (
        f"a masked tensor of shape {tuple(tensor.shape)} was handed to a transform of torch.func (vmap, grad, jvp …), "
        "which wraps it as it is: its mask would be out of sight, and derivatives would be those of the plain "
        "operators. "
        "Use the transform of the same name from masked_dispatch.functional, or hand in x.get_data() and x.get_mask() "
        "and mask inside."
    )


def linearized(tensor: Tensor) -> str:
    """Why torch.func.linearize may not meet a masked tensor."""
    return (
        f"a masked tensor of shape {tuple(tensor.shape)} takes part in what torch.func.linearize records: the graph "
        "would know neither its mask nor its derivative. Use masked_dispatch.functional.jvp."
    )


def returned_to_torch_func(tensor: Tensor) -> str:
    """Why a masked tensor may not leave a transform of torch.func."""
    return (
        f"a masked tensor of shape {tuple(tensor.shape)} that was made inside a transform of torch.func (vmap, grad, "
        "jvp …) leaves it; torch.func would give silent zeros, or a tensor that is dead. Use the transform of the same "
        "name from masked_dispatch.functional, or return x.to_tensor(fill) (and x.get_mask())."
    )


def tangent_stored_otherwise(found: Any) -> str:
    """A compiled region returned a sparsely stored tensor, and something else came back as its gradient."""
    kind = f"one stored as {found.storage_layout}" if hasattr(found, "storage_layout") else "a plain tensor"
    return (
        "a compiled function returned a sparsely stored masked tensor, and the gradient that came back for it, of "
        f"shape {tuple(found.shape)}, is {kind}: the graph takes gradients that are stored as its results are. If it "
        "was handed to backward(), hand over grad.mask_like(y). If the loss does not depend on the result, return it "
        "as y.detach(), or leave it out."
    )
