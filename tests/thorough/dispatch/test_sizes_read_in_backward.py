"""Sizes that torch's backward reads as numbers are numbers in the forward of a graph of any sizes, too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_regions import masked, results_and_gradients, same

pytestmark = pytest.mark.usefixtures("fresh_compiler")
DRAWS = {n: torch.rand(2, 3, n) for n in (2, 3)}
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
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


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_any_sizes(name: str) -> None:
    """If they become known in backward, torch returns other gradients of the graph than it has made of it."""
    compiled = torch.compile(FUNCTIONS[name], backend="aot_eager", fullgraph=True, dynamic=True)
    for size in (6, 7):
        x = masked(2, 3, size, size, requires_grad=True)
        same(*(results_and_gradients(function, [x]) for function in (compiled, FUNCTIONS[name])))
