"""Train the Transformer eagerly on the CPU and compiled by XLA, and print both losses of every step."""

from __future__ import annotations

import copy

import torch

from examples.demo.models import Forecaster
from examples.xla.training import batches, losses_on_xla, stock_losses


def main(number: int = 20) -> None:
    torch.manual_seed(0)
    model = Forecaster(length=26, horizon=6)
    steps = list(batches(number, 16, length=26, horizon=6))
    there, programs = losses_on_xla(copy.deepcopy(model), steps)
    here = stock_losses(model, steps)
    print("step  NaN   loss on the CPU, eager  loss on XLA, compiled")
    for n, ((past, _), mine, theirs) in enumerate(zip(steps, here, there, strict=True)):
        print(f"{n:4}  {float(past.isnan().float().mean()):4.0%}  {mine:22.6f}  {theirs:21.6f}")
    print(f"largest relative difference: {max(abs(a / b - 1) for a, b in zip(there, here, strict=True)):.1e}")
    print(f"compilations of the step, over {number} masks: {programs}")


if __name__ == "__main__":
    main()
