"""The gradients of pooling in compiled code: sizes as inductor takes them, and inductor itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor

import masked_dispatch as md

pytestmark = pytest.mark.usefixtures("fresh_compiler")

Pool = Callable[[Tensor], Tensor]


def pools(n: int) -> dict[str, Pool]:
    """Each pooling function of n dimensions, with defaults and with one number for all dimensions."""

    def named(name: str) -> Callable[..., Any]:
        return getattr(F, f"{name}{n}d")  # type: ignore[no-any-return]

    average, maximum, norm = named("avg_pool"), named("max_pool"), named("lp_pool")
    found: dict[str, Pool] = {
        "avg": lambda x: average(x, 2),
        "avg, overlapping": lambda x: average(x, 3, 1),
        "avg, by ceil": lambda x: average(x, 3, 2, 1, True, False),
        "max": lambda x: maximum(x, 2),
        "max, padded": lambda x: maximum(x, 3, 2, 1),
        "max with indices": lambda x: maximum(x, 2, return_indices=True)[0],
        "lp": lambda x: norm(x + 0.1, 2.0, 2),
        "adaptive avg": lambda x: named("adaptive_avg_pool")(x, 3),
        "adaptive max": lambda x: named("adaptive_max_pool")(x, 3),
    }
    if n > 1:
        draws = torch.rand(2, 2, n)
        found["avg with divisor"] = lambda x: average(x, 2, divisor_override=3)
        found["fractional"] = lambda x: named("fractional_max_pool")(x, 2, output_size=3, _random_samples=draws)
    return found


CASES = [
    pytest.param(n, pool, meaning, id=f"{name}-{n}d-{meaning}")
    for n in (1, 2, 3)
    for name, pool in pools(n).items()
    for meaning in ("missing", "padding")
    if (name, meaning) != ("fractional", "padding")
]


def batch(n: int) -> md.MaskedTensor:
    shape = (2, 2, *[6] * n)
    mask = torch.ones(shape, dtype=torch.bool)
    mask[1, ..., 4:] = False
    mask[0, ..., 2] = False
    data = torch.rand(shape, generator=torch.Generator().manual_seed(n))
    return md.masked_tensor(torch.where(mask, data, torch.nan), mask, requires_grad=True)


def run(pool: Pool, n: int, meaning: Any) -> tuple[Tensor, Tensor]:
    x = batch(n)
    with md.windows(meaning):
        result = pool(x)
        result.sum().backward()
    return result.detach(), x.grad


def sizes_in(graph: torch.fx.GraphModule) -> list[list[int]]:
    """The lists of numbers that pooling operators of a graph are given, but those of whole shapes."""
    nodes = [node for node in graph.graph.nodes if "pool" in str(node.target) and "adaptive" not in str(node.target)]
    return [list(a) for node in nodes for a in node.args if isinstance(a, (list, tuple)) and a]


@pytest.mark.parametrize(("n", "pool", "meaning"), CASES)
def test_a_graph_has_the_sizes_of_each_dimension(n: int, pool: Pool, meaning: str) -> None:
    """inductor's gradient of an average takes no single number for all dimensions."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph)

    compiled = torch.compile(pool, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    found, expected = run(compiled, n, meaning), run(pool, n, meaning)
    for mine, wanted in zip(found, expected, strict=True):
        assert torch.equal(mine.get_mask(), wanted.get_mask())
        assert_close(mine.to_tensor(0), wanted.to_tensor(0))
    assert len(graphs) == 2
    spatial = (n, n + 1)  # torch pools a line as a plane of height 1
    assert {len(sizes) for graph in graphs for sizes in sizes_in(graph)} <= set(spatial if n == 1 else (n,))


@pytest.mark.slow
@pytest.mark.parametrize(("n", "pool", "meaning"), CASES)
def test_inductor(n: int, pool: Pool, meaning: str) -> None:
    found, expected = run(torch.compile(pool), n, meaning), run(pool, n, meaning)
    for mine, wanted in zip(found, expected, strict=True):
        assert torch.equal(mine.get_mask(), wanted.get_mask())
        assert_close(mine.to_tensor(0), wanted.to_tensor(0))


def backward_fails(x: Any) -> bool:
    """Whether the gradient of fractional pooling, compiled for dynamic shapes, raises."""

    def pool(x: Any) -> Any:
        return F.fractional_max_pool2d(x, 2, output_size=(3, 3))

    torch._dynamo.reset()
    try:
        torch.compile(pool, backend="aot_eager", fullgraph=True, dynamic=True)(x).sum().backward()
    except (IndexError, TypeError):
        return True
    return False


@pytest.mark.slow
def test_fractional_pooling_of_dynamic_shapes_compiles_where_that_of_any_wrapper_does() -> None:
    """torch 2.13 has no symbols for the sizes of its gradient, of any subclass."""
    data = torch.rand(2, 3, 6, 6)
    wrapper = TwoTensor(data, data.clone()).requires_grad_()
    assert backward_fails(md.masked_tensor(data, data > 0.2, requires_grad=True)) == backward_fails(wrapper)
