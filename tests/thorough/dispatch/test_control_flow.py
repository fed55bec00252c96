"""torch.cond, scan and while_loop with masked operands, against Python's own if and loops; what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch.nn.attention.flex_attention import flex_attention

import masked_dispatch as md
from compiled_regions import compiled, masked, results_and_gradients, same, x_and_weight

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def loop(function: Callable[..., Any], carry: Any, xs: Tensor) -> Any:
    """What scan does, by a Python loop."""
    collected = []
    for x in xs:
        carry, y = function(carry, x)
        collected.append(y)
    return carry, torch.stack(collected)


def branches(x: Tensor, w: Tensor) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return (lambda x, w: (x.exp() @ w, x * 2), lambda x, w: ((x * 2) @ w, x.softmax(-1)))


def by_cond(x: Tensor, w: Tensor) -> Any:
    return torch.cond(x.count() > 13, *branches(x, w), (x, w))


def by_if(x: Tensor, w: Tensor) -> Any:
    return branches(x, w)[0 if x.count() > 13 else 1](x, w)


def by_closures(x: Tensor, w: Tensor) -> Any:
    first, second = branches(x, w)
    return torch.cond(x.count() > 13, lambda: first(x, w), lambda: second(x, w))


# One of the operands is masked, the results are.
def by_scan(x: Tensor, w: Tensor) -> Any:
    return scan(lambda carry, row: (carry + row @ w, carry * row), torch.ones(6), x)


def by_loop(x: Tensor, w: Tensor) -> Any:
    return loop(lambda carry, row: (carry + row @ w, carry * row), torch.ones(6), x)


def by_scan_of_masked(x: Tensor, w: Tensor) -> Any:
    return scan(lambda carry, row: (carry * row + w[0], carry.exp()), x[0], w)


def by_loop_of_masked(x: Tensor, w: Tensor) -> Any:
    return loop(lambda carry, row: (carry * row + w[0], carry.exp()), x[0], w)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of x[0], which eager scan looks at
@pytest.mark.parametrize("compiling", [False, True])
@pytest.mark.parametrize(
    "operator, python",
    [(by_cond, by_if), (by_closures, by_if), (by_scan, by_loop), (by_scan_of_masked, by_loop_of_masked)],
)
def test_control_flow_of_masked_operands(operator: Any, python: Any, compiling: bool) -> None:
    run, backend = compiled(operator) if compiling else (operator, None)
    for _ in range(4):
        arguments = x_and_weight()
        same(results_and_gradients(run, arguments), results_and_gradients(python, arguments))
    assert backend is None or backend.graphs == 1


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float64])
def test_control_flow_of_every_kind_of_dtype(dtype: torch.dtype) -> None:
    x = (masked() * 3).to(dtype)

    def choose(x: Tensor) -> Any:
        return torch.cond(x.count() > 30, lambda x: x | x, lambda x: x & ~x, (x,))

    if dtype is torch.float64:
        same(torch.cond(x.count() > 30, lambda x: x + 1, lambda x: x - 1, (x,)), x - 1)
    else:
        same(choose(x), x & ~x)


def test_while_loop_of_masked_operands() -> None:
    def run(x: Tensor) -> Any:
        return while_loop(lambda n, x: n < 3, lambda n, x: (n + 1, x * 2 + 1), (torch.tensor(0), x))

    x = masked()
    wanted = x
    for _ in range(3):
        wanted = wanted * 2 + 1
    for function in (run, compiled(run)[0]):
        number, result = function(x)
        assert int(number) == 3
        same(result, wanted)


def test_a_masked_predicate_is_refused() -> None:
    x = masked()
    with pytest.raises(Exception, match=r"masked predicate.*pred.to_tensor\(False\)"):
        torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))
    with pytest.raises(Exception, match=r"condition of a while_loop is masked"):
        while_loop(lambda x: x.sum() < 3, lambda x: (x * 2 + 1,), (x,))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_flex_attention_names_the_attention_that_takes_masked_tensors(fullgraph: bool) -> None:
    run, _ = compiled(lambda x: flex_attention(x, x, x), fullgraph=fullgraph)
    with pytest.raises(md.MaskedSemanticsError, match="scaled_dot_product_attention does"):
        run(masked(2, 2, 16, 16))


def test_associative_scan_names_what_it_runs() -> None:
    with pytest.raises(md.MaskedSemanticsError, match="associative_scan runs one"):
        associative_scan(torch.add, masked(4, 3), 0, combine_mode="generic")
