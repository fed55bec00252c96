"""What the library does, in a few seconds and without any file: four parts, each with a check of what it claims."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from masked_dispatch.api.construct import from_lengths, from_nan, masked_tensor
from masked_dispatch.policies import densify
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry.progress import Bar


@dataclass(frozen=True)
class Part:
    """One part of the demonstration.

    title    what it shows
    text     what is printed, as in a Python session
    figures  the numbers in it
    holds    whether what it claims is so on this machine
    """

    title: str
    text: str
    figures: dict[str, float]
    holds: bool


def parts() -> Iterator[Part]:
    """Every part, as it is done."""
    yield statistics()
    with Bar(2 * STEPS, "step") as bar:
        yield trained(bar.advance)
    yield padding()
    yield packed()


def statistics() -> Part:
    """Means of a table with holes, against those of zeros and NaN in their place."""
    nan = float("nan")
    table = torch.tensor([[20.5, nan, 22.0, 21.0], [nan, 18.0, 19.0, nan], [17.5, 16.0, nan, 18.0]])
    x = from_nan(table)
    mean, zeros = x.mean(1), table.nan_to_num(0).mean(1)
    text = [
        ">>> x = md.from_nan(table)",
        repr(x),
        ">>> x.mean(dim=1)",
        repr(mean),
        ">>> table.nan_to_num(0).mean(dim=1)    # zeros in place of missing values",
        repr(zeros),
        ">>> table.mean(dim=1)                  # plain torch",
        repr(table.mean(1)),
    ]
    expected = table.nanmean(1)
    figures = {f"mean of row {n}": value for n, value in enumerate(mean.tolist())}
    return Part("A mean over the valid elements", "\n".join(text), figures, mean.tolist() == expected.tolist())


def trained(advance: Callable[[], None]) -> Part:
    """A stock network trained on rows with holes: what lies in the holes changes no bit of its losses."""
    first, second = losses(float("nan"), advance), losses(1e30, advance)
    same = first == second
    text = [
        ">>> model = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 1))",
        f"    {STEPS} steps of Adam on {ROWS} rows with 30 % of the features missing",
        f"    loss with NaN under the mask    {first[0]:.4f} -> {first[-1]:.4f}",
        f"    loss with 1e30 under the mask   {second[0]:.4f} -> {second[-1]:.4f}    equal in every step: {same}",
    ]
    figures = {"first loss": first[0], "last loss": first[-1]}
    return Part("Unmodified modules", "\n".join(text), figures, same and first[-1] < first[0] / 2)


def padding() -> Part:
    """A transformer layer on a padded batch gives each sequence what it gives the sequence alone."""
    layer, batch, lengths = layer_and_batch()
    with torch.no_grad():
        together = layer(batch)
        alone = [layer(batch.get_data()[n : n + 1, :length])[0] for n, length in enumerate(lengths)]
    furthest = max(float((together.get_data()[n, :length] - alone[n]).abs().max()) for n, length in enumerate(lengths))
    text = [
        f">>> batch = md.from_lengths(data, lengths)    # lengths {lengths}, NaN as padding",
        ">>> nn.TransformerEncoderLayer(32, 4, batch_first=True)(batch)",
        f"    valid {int(together.count())} of {together.numel()}",
        f"    largest difference from the layer on each sequence alone: {furthest:.1e}",
    ]
    return Part("Padding without effect", "\n".join(text), {"furthest": furthest}, furthest < 1e-5)


def packed() -> Part:
    """The same rows without their padding: what is stored, and that no padding is made on the way."""
    _, batch, lengths = layer_and_batch()
    rows = batch.to_packed()
    feed_forward = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64))
    with torch.no_grad(), densify("never"):
        result = feed_forward(rows)
    text = [
        ">>> rows = batch.to_packed()",
        f"    {batch.stored_bytes:,} bytes padded, {rows.stored_bytes:,} bytes packed",
        '>>> with md.densify("never"): nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64))(rows)',
        f"    stored as {result.storage_layout}: {result.values().shape[0]} rows of {batch.shape[0] * batch.shape[1]}",
    ]
    figures = {"bytes padded": float(batch.stored_bytes), "bytes packed": float(rows.stored_bytes)}
    holds = result.storage_layout is torch.jagged and result.values().shape[0] == sum(lengths)
    return Part("Packed storage", "\n".join(text), figures, holds)


def layer_and_batch() -> tuple[nn.Module, MaskedTensor, list[int]]:
    """A transformer layer, and a padded batch with NaN as its padding."""
    lengths = [7, 2, 5, 3]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).eval()
        data = torch.randn(len(lengths), max(lengths), 32)
    for n, length in enumerate(lengths):
        data[n, length:] = float("nan")
    return layer, from_lengths(data, torch.tensor(lengths)), lengths


# -------------------------- a small network trained on rows with holes, which must not depend on what lies in the holes

STEPS, ROWS, FEATURES = 300, 256, 6


def losses(hidden: float, advance: Callable[[], None]) -> list[float]:
    """The loss after each step, with `hidden` in place of the 30 % of features that are missing."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(ROWS, FEATURES, generator=generator)
    target = data @ torch.linspace(-1, 1, FEATURES)[:, None] + data[:, :1] * data[:, 1:2]
    mask = torch.rand(ROWS, FEATURES, generator=generator) > 0.3
    x = masked_tensor(torch.where(mask, data, hidden), mask)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(FEATURES, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    return [step(model, optimizer, x, target, advance) for _ in range(STEPS)]


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, target: Tensor, advance: Callable[[], None]
) -> float:
    """One step; its loss."""
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), target)
    loss.backward()
    optimizer.step()
    advance()
    return loss.item()
