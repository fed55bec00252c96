"""Fused optimizer steps: Adam, AdamW, SGD and Adagrad with fused=True.

Law: torch's single-tensor formula (foreach=False), whose statements are in-place operators. Each of them updates a
plain tensor, in which positions without a gradient keep their value, or is written back to a masked one. So these rules
are composite: they get the tensors themselves, not records.

Fused operators differ from that formula in three ways: they divide gradients by `grad_scale` in place, skip the step
where `found_inf` is 1, and get `state_steps` that already count this step, which the formula counts itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.optim import adagrad, adam, sgd

from op_registry.authoring import COMPOSITE, masked_rule, packet_name

aten = torch.ops.aten
Tensors = Sequence[Tensor]
SINGLE_TENSOR: dict[str, Any] = {"foreach": False, "fused": False}


def unscaled(grads: Tensors, grad_scale: Tensor | None, found_inf: Tensor | None) -> list[Tensor] | None:
    """The gradients, divided by `grad_scale` in place; None where the step is skipped."""
    if found_inf is not None and bool(found_inf == 1):
        return None
    if grad_scale is not None:
        for grad in grads:
            grad.div_(grad_scale)
    return list(grads)


def steps_before(state_steps: Tensors) -> list[Tensor]:
    """The number of steps before this one."""
    return [step - 1 for step in state_steps]


@masked_rule(
    aten._fused_adam_.default,
    aten._fused_adam_.tensor_lr,
    aten._fused_adamw_.default,
    aten._fused_adamw_.tensor_lr,
    category=COMPOSITE,
    takes_op=True,
)
def _fused_adam_(
    op: OpOverload,
    self: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors,
    state_steps: Tensors,
    *,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    **options: Any,
) -> None:
    unscaled_grads = unscaled(grads, grad_scale, found_inf)
    if unscaled_grads is not None:
        adam.adam(
            list(self),
            unscaled_grads,
            list(exp_avgs),
            list(exp_avg_sqs),
            list(max_exp_avg_sqs),
            steps_before(state_steps),
            decoupled_weight_decay=packet_name(op) == "_fused_adamw_",
            **SINGLE_TENSOR,
            **options,
        )


@masked_rule(aten._fused_adagrad_.default, aten._fused_adagrad_.tensor_lr, category=COMPOSITE)
def _fused_adagrad_(
    self: Tensors,
    grads: Tensors,
    state_sums: Tensors,
    state_steps: Tensors,
    *,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    **options: Any,
) -> None:
    unscaled_grads = unscaled(grads, grad_scale, found_inf)
    if unscaled_grads is not None:
        adagrad.adagrad(
            list(self), unscaled_grads, list(state_sums), steps_before(state_steps), **SINGLE_TENSOR, **options
        )


@masked_rule(aten._fused_sgd_.default, aten._fused_sgd_.tensor_lr, category=COMPOSITE)
def _fused_sgd_(
    self: Tensors,
    grads: Tensors,
    momentum_buffer_list: Tensors,
    *,
    is_first_step: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    **options: Any,
) -> None:
    """On the first step the buffers are uninitialized; the formula allocates new ones, which we copy into them."""
    unscaled_grads = unscaled(grads, grad_scale, found_inf)
    if unscaled_grads is None:
        return
    buffers: list[Any] = [None] * len(self) if is_first_step else list(momentum_buffer_list)
    sgd.sgd(list(self), unscaled_grads, buffers, **SINGLE_TENSOR, **options)
    if is_first_step and options["momentum"] != 0:
        for memory, buffer in zip(momentum_buffer_list, buffers, strict=True):
            # copy_ leaves plain memory as it is where the new buffer is invalid; make that 0, not uninitialized.
            memory.zero_()
            memory.copy_(buffer)


@masked_rule(
    aten._fused_adam.default,
    aten._fused_adam.tensor_lr,
    aten._fused_adamw.default,
    aten._fused_adamw.tensor_lr,
    aten._fused_adagrad.default,
    aten._fused_adagrad.tensor_lr,
    aten._fused_sgd.default,
    aten._fused_sgd.tensor_lr,
    category=COMPOSITE,
    takes_op=True,
)
def _fused(op: OpOverload, *lists: Tensors, **options: Any) -> tuple[list[Tensor], ...]:
    """The in-place step on copies of all lists; returns the copies."""
    copies = [[tensor.clone() for tensor in tensors] for tensors in lists]
    getattr(aten, f"{packet_name(op)}_")(*copies, **options)
    return tuple(copies[: len(op._schema.returns)])
