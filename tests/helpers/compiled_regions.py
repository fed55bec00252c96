"""Compiled functions compared with the same functions run eagerly: results, gradients and the number of graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import masked_dispatch as md
from comparison import same as same

NAN = float("nan")


class Backend:
    """aot_eager that counts the graphs it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        self.graphs += 1
        return aot_eager(graph, inputs)


def compiled(function: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], Backend]:
    backend = Backend()
    return torch.compile(function, backend=backend, **{"fullgraph": True} | options), backend


def masked(*shape: int, requires_grad: bool = False, mask: Any = "random") -> md.MaskedTensor:
    """Random data, NaN under a random mask."""
    shape = shape or (4, 6)
    if isinstance(mask, str):
        mask = torch.rand(shape) > 0.4
    data = torch.randn(shape)
    if mask is not None:
        data = torch.where(mask, data, NAN)
    return md.masked_tensor(data, mask, requires_grad=requires_grad)


def copies(arguments: Any) -> list[Any]:
    return [a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in arguments]


def results_and_gradients(function: Callable[..., Any], arguments: Any) -> tuple[Any, Any]:
    """What the function gives, and the gradients of the sum of everything it gives."""
    leaves = copies(arguments)
    outputs = function(*leaves)
    total = sum(
        (o.to_tensor(0.0) if isinstance(o, md.MaskedTensor) else o).sum()
        for o in (outputs if isinstance(outputs, tuple) else (outputs,))
        if o.requires_grad
    )
    if isinstance(total, Tensor):
        total.backward()
    return outputs, [a.grad for a in leaves if isinstance(a, Tensor) and a.grad is not None]


def check(
    function: Callable[..., Any], make: Callable[[], Any], graphs: int = 1, calls: int = 3, **options: Any
) -> None:
    """Compiled gives what eager gives, gradients included, for several masks, in `graphs` graphs."""
    run, backend = compiled(function, **options)
    for _ in range(calls):
        arguments = make()
        same(results_and_gradients(run, arguments), results_and_gradients(function, arguments))
    assert backend.graphs == graphs


def x_and_weight() -> list[Any]:
    return [masked(requires_grad=True), torch.randn(6, 6, requires_grad=True)]


def data_and_mask(rows: int = 4) -> tuple[Tensor, Tensor]:
    mask = torch.rand(rows, 6) > 0.4
    return torch.where(mask, torch.randn(rows, 6), NAN), mask


def upper_left(rows: int, columns: int) -> md.MaskedTensor:
    """A masked tensor of which the same elements are valid whatever its sizes."""
    mask = torch.zeros(rows, columns, dtype=torch.bool)
    mask[:2, :2] = True
    return masked(rows, columns, mask=mask)
