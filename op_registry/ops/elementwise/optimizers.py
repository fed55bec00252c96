"""Optimizer steps that are one operator: Adam, AdamW, SGD and Adagrad with fused=True.

Law: the optimizer's own formula, line by line, as it is with foreach=False. Every line is an in-place operator on some
tensor: an update where that is plain, so that positions without a gradient keep their value, and written back where it
is masked. Hence these rules are composite: they are given the tensors themselves.

What the fused operators do beside the formula: gradients are divided by `grad_scale` in place, nothing happens where
`found_inf` says 1, and the steps are those after this one, which the formula counts itself.
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
FORMULA: dict[str, Any] = {"foreach": False, "fused": False}


def unscaled(grads: Tensors, grad_scale: Tensor | None, found_inf: Tensor | None) -> list[Tensor] | None:
    """The gradients, without the factor that kept them from vanishing; None for a step that is not taken."""
    if found_inf is not None and bool(found_inf == 1):
        return None
    if grad_scale is not None:
        for grad in grads:
            grad.div_(grad_scale)
    return list(grads)


def before(state_steps: Tensors) -> list[Tensor]:
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
    given = unscaled(grads, grad_scale, found_inf)
    if given is not None:
        adam.adam(
            list(self),
            given,
            list(exp_avgs),
            list(exp_avg_sqs),
            list(max_exp_avg_sqs),
            before(state_steps),
            decoupled_weight_decay=packet_name(op) == "_fused_adamw_",
            **FORMULA,
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
    given = unscaled(grads, grad_scale, found_inf)
    if given is not None:
        adagrad.adagrad(list(self), given, list(state_sums), before(state_steps), **FORMULA, **options)


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
    """With the first step buffers come as mere memory; the formula makes its own, which go there."""
    given = unscaled(grads, grad_scale, found_inf)
    if given is None:
        return
    buffers: list[Any] = [None] * len(self) if is_first_step else list(momentum_buffer_list)
    sgd.sgd(list(self), given, buffers, **FORMULA, **options)
    if is_first_step and options["momentum"] != 0:
        for memory, buffer in zip(momentum_buffer_list, buffers, strict=True):
            # Where the buffer is invalid, plain memory keeps what it has, which so far is nothing anybody wrote.
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
    """The same on copies of all lists, which come back."""
    copies = [[tensor.clone() for tensor in tensors] for tensors in lists]
    getattr(aten, f"{packet_name(op)}_")(*copies, **options)
    return tuple(copies[: len(op._schema.returns)])
