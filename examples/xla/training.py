"""A training step as a function: parameters and a masked batch in, the loss and new parameters out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import masked_dispatch as md
from op_registry.conformance.reference_device import compilations

Named = dict[str, Tensor]


@dataclass(frozen=True)
class State:
    """What a step changes: the parameters, and the momentum of each."""

    parameters: Named
    momenta: Named

    @classmethod
    def of(cls, model: nn.Module) -> State:
        parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
        return cls(parameters, {name: torch.zeros_like(p) for name, p in parameters.items()})


def batches(number: int, size: int, length: int, horizon: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Windows of noisy waves, (size, length), and what follows, (size, horizon); each batch has other holes."""
    generator = torch.Generator().manual_seed(0)
    for n in range(number):
        start = 6.28 * torch.rand(size, 1, generator=generator)
        waves = torch.sin(start + 0.3 * torch.arange(length + horizon))
        waves += 0.1 * torch.randn(waves.shape, generator=generator)
        holes = torch.rand(waves.shape, generator=generator) < 0.1 + 0.8 * n / number
        waves = waves.masked_fill(holes, torch.nan)
        yield waves[:, :length], waves[:, length:]


def step_of(
    model: nn.Module, learning_rate: float = 0.02, momentum: float = 0.9
) -> Callable[[Named, Named, Tensor, Tensor], tuple[Tensor, Named, Named]]:
    """A step of SGD with momentum on masked windows and what follows them; jax differentiates."""
    from torchax.interop import jax_value_and_grad

    def loss_of(parameters: Named, past: Tensor, future: Tensor) -> Tensor:
        return F.mse_loss(functional_call(model, parameters, (past,)), future).to_tensor(0.0)

    def step(parameters: Named, momenta: Named, past: Tensor, future: Tensor) -> tuple[Tensor, Named, Named]:
        loss, gradients = jax_value_and_grad(loss_of)(parameters, past, future)
        moved = {name: momentum * momenta[name] + gradient for name, gradient in gradients.items()}
        return loss, {name: p - learning_rate * moved[name] for name, p in parameters.items()}, moved

    return step


def stock_losses(model: nn.Module, steps: list[tuple[Tensor, Tensor]]) -> list[float]:
    """The losses of an ordinary training loop on the CPU, with torch's own optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for past, future in steps:
        loss = F.mse_loss(model(md.from_nan(past)), md.from_nan(future))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def losses_on_xla(model: nn.Module, steps: list[tuple[Tensor, Tensor]]) -> tuple[list[float], int]:
    """Those of the same steps in one compiled function of masked tensors, and how many times XLA compiled it."""
    import torchax
    from torchax.interop import jax_jit

    md.torchax.enable()
    compiled, state, losses, programs = jax_jit(step_of(model)), State.of(model), [], 0
    with torchax.default_env():
        parameters = {name: p.to("jax") for name, p in state.parameters.items()}
        momenta = {name: m.to("jax") for name, m in state.momenta.items()}
        for past, future in steps:
            batch = md.from_nan(past).to("jax"), md.from_nan(future).to("jax")
            with compilations() as counted:
                loss, parameters, momenta = compiled(parameters, momenta, *batch)
            losses.append(loss.item())
            programs += counted.number
    return losses, programs
