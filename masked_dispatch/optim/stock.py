"""torch's optimizers whose formula goes wrong for masked gradients of plain parameters, refused before their step."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from masked_dispatch.optim.masked_step import MaskedStep
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry.errors import MaskedSemanticsError

# Why, and what works.
REFUSED: dict[type[Optimizer], tuple[str, str]] = {
    torch.optim.Adamax: (
        "divides by its running maximum, which is 0 where there has been no gradient: 0/0",
        "masked_dispatch.optim.Adamax",
    ),
    torch.optim.Rprop: (
        "makes its step sizes from the first gradient: an element that is invalid there is never stepped again",
        "masked_dispatch.optim.Rprop",
    ),
    torch.optim.Adafactor: (
        "averages over the rows and columns of a gradient, into state that it makes from the first one",
        "masked_dispatch.optim.Adagrad or LazyAdam",
    ),
    torch.optim.Muon: (
        "orthogonalises the gradient as a whole matrix, in state that it makes from the first one",
        "masked_dispatch.optim.SGD or LazyAdam",
    ),
    torch.optim.LBFGS: (
        "combines gradients of several steps, each as one vector: an element that misses one is never stepped again",
        "masked_dispatch.optim.SGD or LazyAdam",
    ),
    torch.optim.SparseAdam: (
        "takes gradients in torch's COO layout alone",
        "masked_dispatch.optim.LazyAdam",
    ),
}


def refuse_masked_gradients() -> None:
    """Register the refusals with torch, for every optimizer of the process."""
    register_optimizer_step_pre_hook(refuse)


def refuse(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise MaskedSemanticsError if the optimizer is about to take a masked gradient that it cannot take."""
    if isinstance(optimizer, MaskedStep):
        return
    reason = next((REFUSED[cls] for cls in type(optimizer).__mro__ if cls in REFUSED), None)
    if reason is None:
        return
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        if isinstance(parameter.grad, MaskedTensor) and not isinstance(parameter, MaskedTensor):
            name = type(optimizer).__name__
            only_sparse = isinstance(optimizer, torch.optim.SparseAdam)
            plain = "to_torch_sparse(layout=torch.sparse_coo)" if only_sparse else "to_tensor(0)"
            raise MaskedSemanticsError(
                f"{name} cannot step parameter {number} of shape {tuple(parameter.shape)}: the parameter is plain and "
                f"its gradient masked, and {name} {reason[0]}. Use {reason[1]}, or give the parameter a plain "
                f"gradient: p.grad = p.grad.{plain}"
            )
