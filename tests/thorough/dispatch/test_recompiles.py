"""What is compiled again, and what is not; sizes that a backward reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import masked_dispatch as md
from compiled_regions import NAN, masked, results_and_gradients, same
from examples.demo.models import Autoencoder, Forecaster

pytestmark = pytest.mark.usefixtures("fresh_compiler")
W = torch.randn(6, 6)
# P7 compiles the operators of torch's database and calls each under two masks: these are chains of them.
FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda x: (x * 2 + x[0]) / (x.abs() + 1),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "mean": lambda x: x.mean(-1),
    "quantile": lambda x: x.quantile(0.3, dim=1),
    "count": lambda x: x.count(1),
    "cumsum": lambda x: x.cumsum(1),
    "sort": lambda x: x.sort(1),
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (6,)),
    "matmul": lambda x: x @ W,
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2, 3])),
    "cov": lambda x: x.cov(),
    "view": lambda x: x[1:, ::2].reshape(-1),
    "cat": lambda x: torch.cat([x, x.exp()]),
    "index_add": lambda x: x.index_add(0, torch.tensor([0, 0]), x[:2]),
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


def masks(*shape: int) -> list[Tensor]:
    """20 masks, of which 0 to 100 % is valid."""
    return [torch.rand(shape) < share / 19 for share in range(20)]


def check_masks(run: Callable[..., Any], function: Callable[..., Any], shape: tuple[int, ...]) -> None:
    """20 masks: compiled at the first, and equal to eager at each."""
    for number, mask in enumerate(masks(*shape)):
        x = md.masked_tensor(torch.where(mask, torch.randn(shape), NAN), mask)
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            found = run(x)
        same(tuple(found) if isinstance(found, tuple) else found, function(x))


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions_are_compiled_once_for_20_masks(function: Callable[[Tensor], Any]) -> None:
    check_masks(torch.compile(function, backend="eager", fullgraph=True), function, (4, 6))


@pytest.mark.parametrize("make, shape", MODELS.values(), ids=MODELS)
def test_models_are_compiled_once_for_20_masks(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    net = make().eval()
    check_masks(torch.compile(net, backend="eager"), net, (3, *shape))


KINDS: dict[str, Callable[[], Tensor | None]] = {
    "none": lambda: None,
    "full": lambda: torch.rand(4, 6) > 0.4,
    "rows": lambda: torch.rand(4, 1) > 0.4,
    "columns": lambda: torch.rand(1, 6) > 0.4,
    "expanded": lambda: (torch.rand(4, 1) > 0.4).expand(4, 6),
}


@pytest.mark.parametrize("name", ["arithmetic", "mean", "softmax", "matmul", "sort", "cat"])
def test_each_kind_of_mask_is_compiled_once(name: str) -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    function = FUNCTIONS[name]
    run = torch.compile(function, backend=backend, fullgraph=True)
    for _ in range(2):
        for kind in KINDS.values():
            x = masked(4, 6, mask=kind())
            same(run(x), function(x))
    assert len(graphs) <= len(KINDS)


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
