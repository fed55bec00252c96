"""What is compiled again, and what is not; sizes that a backward reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compiled_regions import compiled, masked, results_and_gradients, same
from examples.demo.models import Autoencoder, Forecaster

pytestmark = pytest.mark.usefixtures("fresh_compiler")
W = torch.randn(6, 6)
# P7 compiles the operators of torch's database and calls each under two masks. It asks nothing of other kinds of masks
# or of other sizes.
FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda x: (x * 2 + x[0]) / (x.abs() + 1),
    "mean": lambda x: x.mean(-1),
    "cumsum": lambda x: x.cumsum(1),
    "sort": lambda x: x.sort(1),
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (6,)),
    "matmul": lambda x: x @ W,
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "cat": lambda x: torch.cat([x, x.exp()]),
}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 6))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


# Each with the shape of a sample.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP": (mlp, (6,)),
    "batch norm": (lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()), (6,)),
    "convolutions": (lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool1d(2)), (2, 8)),
    "attention": (Attending, (5, 6)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), (5, 6)),
    "residual": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Softmax(-1)), (3, 6)),
    "forecaster": (lambda: Forecaster(8, 3, 8, 2, 1), (8,)),
    "autoencoder": (lambda: Autoencoder(4, 2), (1, 8, 8)),
}


@pytest.mark.parametrize("make, shape", MODELS.values(), ids=MODELS)
def test_models_are_compiled_once_for_20_masks(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    """Of them, 0 to 100 % is valid."""
    net = make().eval()
    run = torch.compile(net, backend="eager")
    for number in range(20):
        x = masked(3, *shape, mask=torch.rand(3, *shape) < number / 19)
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            found = run(x)
        same(found, net(x))


KINDS: dict[str, Callable[[], Tensor | None]] = {
    "none": lambda: None,
    "full": lambda: torch.rand(4, 6) > 0.4,
    "rows": lambda: torch.rand(4, 1) > 0.4,
    "columns": lambda: torch.rand(1, 6) > 0.4,
    "expanded": lambda: (torch.rand(4, 1) > 0.4).expand(4, 6),
}


@pytest.mark.parametrize("name", ["arithmetic", "mean", "softmax", "matmul", "sort", "cat"])
def test_each_kind_of_mask_is_compiled_once(name: str) -> None:
    function = FUNCTIONS[name]
    run, backend = compiled(function)
    for _ in range(2):
        for kind in KINDS.values():
            x = masked(4, 6, mask=kind())
            same(run(x), function(x))
    assert backend.graphs <= len(KINDS)


@pytest.mark.parametrize(
    "name", ["arithmetic", "mean", "softmax", "matmul", "layer_norm", "attention", "sort", "cumsum"]
)
def test_sizes_are_dynamic(name: str) -> None:
    function = FUNCTIONS[name]
    run = torch.compile(function, backend="eager", fullgraph=True, dynamic=True)
    for number, rows in enumerate((3, 7, 4, 9, 2)):
        x = masked(rows, 6)
        with torch._dynamo.config.patch(error_on_recompile=number > 1):
            same(run(x), function(x))


@pytest.mark.parametrize("dynamic", [None, True])
def test_sizes_may_change(dynamic: bool | None) -> None:
    run, backend = compiled(FUNCTIONS["mean"], dynamic=dynamic)
    for rows in range(3, 8):
        x = masked(rows, 6, requires_grad=True)
        same(*(results_and_gradients(function, [x]) for function in (run, FUNCTIONS["mean"])))
    assert backend.graphs == (2 if dynamic is None else 1)


# --------------------------------------------------------------------------------------------- sizes read in backward


DRAWS = {n: torch.rand(2, 3, n) for n in (2, 3)}
READING_SIZES: dict[str, Callable[[Tensor], Tensor]] = {
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(x, 2, output_size=3, _random_samples=DRAWS[2]),
    "fractional_max_pool3d": lambda x: F.fractional_max_pool3d(
        x[..., None].expand(-1, -1, -1, -1, 6), 2, output_size=3, _random_samples=DRAWS[3]
    ),
    "cumprod": lambda x: x.cumprod(-1),
    "cumprod of rows": lambda x: x.flatten(1).cumprod(0),
    "masked.cumprod": lambda x: torch.masked.cumprod(x, 1),
    "vander": lambda x: torch.vander(x[0, 0, 0]),
    "linalg.vander": lambda x: torch.linalg.vander(x[0]),
    "linalg.vander, a number of powers": lambda x: torch.linalg.vander(x, N=3),
}


@pytest.mark.parametrize("name", READING_SIZES)
def test_gradients_of_any_sizes(name: str) -> None:
    """If they become known in backward, torch returns other gradients of the graph than it has made of it."""
    compiled = torch.compile(READING_SIZES[name], backend="aot_eager", fullgraph=True, dynamic=True)
    for size in (6, 7):
        x = masked(2, 3, size, size, requires_grad=True)
        same(*(results_and_gradients(function, [x]) for function in (compiled, READING_SIZES[name])))
