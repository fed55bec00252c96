"""One model, trained the same way on the same batches by competitors that treat holes differently."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import masked_dispatch as md
from examples.demo.console import progress_bar, say, table
from examples.demo.training import Batch, Run, train

# What a competitor does to a tensor with NaN in its holes, before the model sees it.
Prepare = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Competitor:
    name: str
    prepare: Prepare
    compiled: bool = False


MASKED = Competitor("masked, eager", md.from_nan)
MASKED_COMPILED = Competitor("masked, compiled", md.from_nan, compiled=True)


def compete(
    name: str,
    make_model: Callable[[], nn.Module],
    competitors: Sequence[Competitor],
    raw_batches: Sequence[Batch],
    held_out_error: Callable[[nn.Module, Prepare], float],
    unit: str,
) -> dict[str, Run]:
    """Train each competitor on `raw_batches`, whose holes are NaN, and print its results."""
    runs, rows = {}, []
    with progress_bar(len(raw_batches) * len(competitors)) as bar:
        for competitor in competitors:
            bar.label(f"{name}: {competitor.name}")
            batches = [(competitor.prepare(x), competitor.prepare(y)) for x, y in raw_batches]
            run = runs[competitor.name] = train(make_model, batches, bar, compiled=competitor.compiled)
            error = held_out_error(run.model, competitor.prepare)
            counted = run.compilation
            counts = [counted.graphs, counted.breaks, counted.recompiles] if counted else [None] * 3
            rows.append([competitor.name, run.last_loss, error, f"{run.first_step:.2f} s", run.per_step, *counts])
            if md.is_masked_tensor(batches[0][0]):
                hidden = [t.get_data()[~t.get_mask()] for batch in batches for t in batch]
                assert all(h.isnan().all() for h in hidden), "the data under the masks must still be NaN"
    table(
        ("", "loss", f"held-out error, {unit}", "first step", "ms a step", "graphs", "breaks", "recompiles"),
        rows,
        caption=(
            f"loss: mean of the last 10 of {len(raw_batches)} training steps; one who fills holes fills targets too: "
            "compare held-out errors. graphs, breaks, recompiles: what torch.compile made, where it had to stop, "
            "and how often another mask made it begin again"
        ),
    )
    eager, compiled = (torch.tensor(runs[c.name].losses) for c in (MASKED, MASKED_COMPILED))
    apart = ((eager - compiled) / eager).abs().tolist()
    say(
        f"relative difference of eager and compiled losses: {apart[0]:.1e} at the first step, at most "
        f"{max(apart):.1e} later (rounding, amplified by training)"
    )
    return runs


def filled(output: Tensor) -> Tensor:
    """A plain tensor, NaN where a masked output is invalid."""
    return output.to_tensor(float("nan")) if md.is_masked_tensor(output) else output
