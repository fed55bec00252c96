"""Operators on lists of tensors: `_foreach_*` operators that need a rule, and fused optimizer steps.

Law of `_foreach_*` operators: the same as on each tensor alone. Those here have no single-tensor form, or write to more
than the list; all others run their single-tensor form on each tensor of the list.

Law of fused optimizer steps (Adam, AdamW, SGD and Adagrad with fused=True): torch's single-tensor formula
(foreach=False), whose statements are in-place operators. Each of them updates a plain tensor, in which positions
without a gradient keep their value, or is written back to a masked one. So validity, and which elements change, follow
from each statement and not from the step as a whole. torch's fused kernel is not called if a tensor of the lists is
masked, even if all its elements are valid.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.optim import adagrad, adam, sgd

from op_registry.authoring import (
    ASSIGNMENT,
    COMPOSITE,
    REDUCTION,
    Bound,
    Dense,
    Number,
    Unknown,
    accumulation_dtype,
    by_rule,
    masked_rule,
    packet_name,
)

aten = torch.ops.aten


@masked_rule(aten._foreach_norm.Scalar, category=REDUCTION, dims=Unknown("it is one call for each of a list"))
def _foreach_norm(self: list[Dense], ord: Number = 2, dtype: torch.dtype | None = None) -> list[Dense]:
    """The vector norm of each tensor over its valid elements."""
    return [by_rule(aten.linalg_vector_norm.default, x, ord, dtype=dtype) for x in self]


@masked_rule(aten._foreach_powsum.Scalar, category=REDUCTION, dims=Unknown("it is one call for each of a list"))
def _foreach_powsum(self: list[Dense], ord: Number = 2, dtype: torch.dtype | None = None) -> list[Dense]:
    """For each tensor the sum of ``abs(x) ** ord`` over its valid elements."""

    def powsum(x: Dense) -> Dense:
        if x.validity is None:
            return Dense(aten._foreach_powsum([x.data], ord, dtype)[0])
        powers = x.filled(1).to(dtype or accumulation_dtype(x.dtype)).abs().pow(ord)
        return Dense(x.like(powers).filled(0).sum().to(dtype or x.dtype), x.any_valid())

    return [powsum(x) for x in self]


@masked_rule(
    aten._amp_foreach_non_finite_check_and_unscale_.default,
    category=ASSIGNMENT,
    dims=Unknown("it writes to a list of tensors"),
)
def _amp_foreach_non_finite_check_and_unscale_(self: list[Dense], found_inf: Dense, inv_scale: Dense) -> None:
    """Unscale gradients in place, and set `found_inf` if a valid element of one is not finite.

    Invalid elements are set to 0 before the check. The operator has no functional form that could be written back, so
    this rule itself writes to the data of its records.
    """
    for x in self:
        if x.validity is not None:
            x.data.copy_(x.filled(0))
    aten._amp_foreach_non_finite_check_and_unscale_([x.data for x in self], found_inf.data, inv_scale.data)


# ------------------------------------------------------------------------------------------------ fused optimizer steps

# These rules are composite: they get the tensors themselves, not records. Fused operators differ from the single-tensor
# formula in three ways: they divide gradients by `grad_scale` in place, skip the step where `found_inf` is 1, and get
# `state_steps` that already count this step, which the formula counts itself.

FORMULAS: dict[str, Callable[..., None]] = {
    "_fused_adam_": adam.adam,
    "_fused_adamw_": functools.partial(adam.adam, decoupled_weight_decay=True),
    "_fused_adagrad_": adagrad.adagrad,
    "_fused_sgd_": sgd.sgd,
}


@masked_rule(*(getattr(aten, name) for name in FORMULAS), category=COMPOSITE, takes_call=True)
def fused_step(c: Bound) -> None:
    """On SGD's first step the buffers are uninitialized; the formula allocates new ones, which we copy into them."""
    if c.found_inf is not None and bool(c.found_inf == 1):
        return
    if c.grad_scale is not None:
        for grad in c.grads:
            grad.div_(c.grad_scale)
    lists: dict[str, list[Any]] = {n: list(value) for n, value in c.named.items() if isinstance(value, (list, tuple))}
    options = {n: v for n, v in c.named.items() if n not in (*lists, "grad_scale", "found_inf", "is_first_step")}
    if "state_steps" in c:
        lists["state_steps"] = [step - 1 for step in c.state_steps]
    allocates = "is_first_step" in c and c.is_first_step
    if allocates:
        lists["momentum_buffer_list"] = [None] * len(c.self)
    FORMULAS[packet_name(c.op)](*lists.values(), foreach=False, fused=False, **options)
    if allocates and c.momentum != 0:
        for memory, buffer in zip(c.momentum_buffer_list, lists["momentum_buffer_list"], strict=True):
            # copy_ leaves plain memory as it is where the new buffer is invalid; make that 0, not uninitialized.
            memory.zero_()
            memory.copy_(buffer)


@masked_rule(*(getattr(aten, name.removesuffix("_")) for name in FORMULAS), category=COMPOSITE, takes_op=True)
def _fused(op: OpOverload, *lists: Sequence[Tensor], **options: Any) -> tuple[list[Tensor], ...]:
    """The in-place step on copies of all lists; returns the copies."""
    copies = [[tensor.clone() for tensor in tensors] for tensors in lists]
    getattr(aten, f"{packet_name(op)}_")(*copies, **options)
    return tuple(copies[: len(op._schema.returns)])
