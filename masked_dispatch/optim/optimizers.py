"""torch's optimizers with `MaskedStep`: those whose formula treats each element by itself."""

from __future__ import annotations

from typing import ClassVar

import torch

from masked_dispatch.optim.masked_step import MaskedStep


class Adagrad(MaskedStep, torch.optim.Adagrad):
    """torch.optim.Adagrad on the elements of masked gradients: the step it takes for torch's sparse gradients.

    Arguments, defaults and state (`sum`, `step`) are those of torch.optim.Adagrad; `weight_decay` only decays
    elements that have a gradient. Raises ValueError for `differentiable=True`, and what torch.optim.Adagrad raises.
    """


class SGD(MaskedStep, torch.optim.SGD):
    """torch.optim.SGD on the elements of masked gradients.

    Arguments, defaults and state (`momentum_buffer`) are those of torch.optim.SGD; momentum and `weight_decay` only
    apply to elements that have a gradient. An element without a gradient so far has momentum 0. Raises ValueError for
    `differentiable=True`, and what torch.optim.SGD raises.
    """


class LazyAdam(MaskedStep, torch.optim.Adam):
    """torch.optim.Adam whose averages change only where a gradient is valid; torch.optim.SparseAdam for any layout.

    Arguments, defaults and state (`exp_avg`, `exp_avg_sq`, `step`) are those of torch.optim.Adam, `amsgrad` and
    `decoupled_weight_decay` included. Steps are counted per parameter. With a gradient that is valid everywhere
    it is Adam; it differs from SparseAdam only in adding `eps` after bias correction.
    Raises ValueError for `differentiable=True`, and what torch.optim.Adam raises.
    """


class AdamW(MaskedStep, torch.optim.AdamW):
    """torch.optim.AdamW whose averages change, and whose weights decay, only where a gradient is valid.

    Arguments, defaults and state (`exp_avg`, `exp_avg_sq`, `step`) are those of torch.optim.AdamW; steps are counted
    per parameter. Raises ValueError for `differentiable=True`, and what torch.optim.AdamW raises.
    """


class NAdam(MaskedStep, torch.optim.NAdam):
    """torch.optim.NAdam whose averages change only where a gradient is valid.

    Arguments, defaults and state (`exp_avg`, `exp_avg_sq`, `mu_product`, `step`) are those of torch.optim.NAdam; steps
    and `mu_product` are counted per parameter. Raises ValueError for `differentiable=True`, and what torch.optim.NAdam
    raises.
    """


class RAdam(MaskedStep, torch.optim.RAdam):
    """torch.optim.RAdam whose averages change only where a gradient is valid.

    Arguments, defaults and state (`exp_avg`, `exp_avg_sq`, `step`) are those of torch.optim.RAdam; steps, and so the
    rectification, are counted per parameter. Raises ValueError for `differentiable=True`, and what torch.optim.RAdam
    raises.
    """


class Adamax(MaskedStep, torch.optim.Adamax):
    """torch.optim.Adamax whose averages change only where a gradient is valid.

    Arguments, defaults and state (`exp_avg`, `exp_inf`, `step`) are those of torch.optim.Adamax, which itself is
    refused for masked gradients: it divides by `exp_inf`, 0 in elements that never had one. Raises ValueError for
    `differentiable=True`, and what torch.optim.Adamax raises.
    """


class RMSprop(MaskedStep, torch.optim.RMSprop):
    """torch.optim.RMSprop whose averages and momentum change only where a gradient is valid.

    Arguments, defaults and state (`square_avg`, `momentum_buffer`, `grad_avg`, `step`) are those of
    torch.optim.RMSprop. Raises ValueError for `differentiable=True`, and what torch.optim.RMSprop raises.
    """


class Adadelta(MaskedStep, torch.optim.Adadelta):
    """torch.optim.Adadelta whose averages change only where a gradient is valid.

    Arguments, defaults and state (`square_avg`, `acc_delta`, `step`) are those of torch.optim.Adadelta. Raises
    ValueError for `differentiable=True`, and what torch.optim.Adadelta raises.
    """


class Rprop(MaskedStep, torch.optim.Rprop):
    """torch.optim.Rprop whose step sizes change only where a gradient is valid.

    Arguments, defaults and state (`prev`, `step_size`, `step`) are those of torch.optim.Rprop; `prev` is the last
    gradient that an element had. torch.optim.Rprop itself is refused for masked gradients: its step sizes would keep
    the intersection of the masks. Raises ValueError for `differentiable=True`, and what torch.optim.Rprop raises.
    """

    initial_state: ClassVar = {"step_size": "lr"}
