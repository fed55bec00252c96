"""Gradient formulas of losses, called by hand; the law is in op_registry/laws/derivatives.py."""

from __future__ import annotations

import torch

from op_registry.authoring import derivative

aten = torch.ops.aten

mse_loss_backward = derivative(aten.mse_loss_backward.default, of=aten.mse_loss.default)
smooth_l1_loss_backward = derivative(aten.smooth_l1_loss_backward.default, of=aten.smooth_l1_loss.default)
huber_loss_backward = derivative(aten.huber_loss_backward.default, of=aten.huber_loss.default)
soft_margin_loss_backward = derivative(aten.soft_margin_loss_backward.default, of=aten.soft_margin_loss.default)
binary_cross_entropy_backward = derivative(
    aten.binary_cross_entropy_backward.default, of=aten.binary_cross_entropy.default
)
nll_loss_backward = derivative(aten.nll_loss_backward.default, of=aten.nll_loss_forward.default)
nll_loss2d_backward = derivative(aten.nll_loss2d_backward.default, of=aten.nll_loss2d_forward.default)
multi_margin_loss_backward = derivative(aten.multi_margin_loss_backward.default, of=aten.multi_margin_loss.default)
multilabel_margin_loss_backward = derivative(
    aten.multilabel_margin_loss_backward.default, of=aten.multilabel_margin_loss.default
)
_ctc_loss_backward = derivative(aten._ctc_loss_backward.default, of=aten._ctc_loss.default, by=("log_probs",))
_ctc_loss_backward_tensor = derivative(aten._ctc_loss_backward.Tensor, of=aten._ctc_loss.Tensor, by=("log_probs",))
