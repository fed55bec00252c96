"""2b. An unmodified convolutional autoencoder restores digits: masked, and with holes filled in the two usual ways.

Each step hides a quarter of the remaining pixels from the input, the same ones for every competitor, and compares the
output with all remaining pixels. So the model learns to restore, and the masks change with every step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from examples.demo.competition import MASKED, MASKED_COMPILED, Competitor, Prepare, compete, filled
from examples.demo.console import say
from examples.demo.data import NAN, Digits, digits_data
from examples.demo.models import Autoencoder
from examples.demo.training import Batch, predict, rows_of_batches


def competitors(data: Digits) -> tuple[Competitor, ...]:
    pixel_means = data.train.nanmean(0, keepdim=True)
    return (
        MASKED,
        MASKED_COMPILED,
        Competitor("zeros in the holes", lambda x: x.nan_to_num(0.0)),
        Competitor("means in the holes", lambda x: torch.where(x.isnan(), pixel_means, x)),
    )


def training_batches(data: Digits, epochs: int, size: int = 128, hidden: float = 0.25) -> list[Batch]:
    """(digits with more pixels hidden, digits), with NaN in the holes."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for rows in rows_of_batches(len(data.train), size, epochs):
        digits = data.train[rows]
        hide = torch.rand(digits.shape, generator=generator) < hidden
        batches.append((torch.where(hide, NAN, digits), digits))
    return batches


def error_where_missing(restored: Tensor, data: Digits) -> float:
    """Root mean squared error of grey levels (0 to 1) over the held-out digits' missing pixels."""
    missing = data.held_out.isnan()
    return float((restored - data.held_out_truth)[missing].square().mean().sqrt())


@dataclass(frozen=True)
class Restored:
    """What the plots show: the digits, and the held-out ones as the masked model restores them."""

    data: Digits
    restored: Tensor


def show(epochs: int = 20) -> Restored:
    data = digits_data()

    def restore(model: nn.Module, prepare: Prepare) -> Tensor:
        return filled(predict(model, prepare(data.held_out)))

    say(
        f"Autoencoder: {len(data.train)} digits of 8×8 pixels to train on, {len(data.held_out)} held out, "
        f"{float(data.train.isnan().float().mean()):.0%} of the pixels missing (NaN)."
    )
    runs = compete(
        "Autoencoder",
        Autoencoder,
        competitors(data),
        training_batches(data, epochs),
        lambda model, prepare: error_where_missing(restore(model, prepare), data),
        unit="rms grey",
    )
    return Restored(data, restore(runs[MASKED.name].model, MASKED.prepare))
