"""P1, "same errors": backward runs a second time through a node where it does in plain torch.

torch frees what a node saved in the first backward, and refuses a second one there. A node that saves nothing, as those
of additions and views, takes any number of them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import masked_dispatch as md

MASK = torch.tensor([True, False, True])
SECOND = "Trying to backward through the graph a second time"

OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x,
    "add": lambda x: x + 1,
    "neg": lambda x: -x,
    "clone": lambda x: x.clone(),
    "view": lambda x: x.view(3, 1),
    "slice": lambda x: x[0:2],
    "expand": lambda x: x.expand(2, 3),
    "cat": lambda x: torch.cat([x, x]),
    "masks": lambda x: md.as_masked_tensor(x, torch.tensor([True, True, False])),
    "mul": lambda x: x * x,
    "exp": lambda x: x.exp(),
    "where": lambda x: torch.where(torch.tensor([True, False, True]), x, x),
}
# These compute with the mask, and their fill saves it: a second time is refused where a mask is stored.
WITH_FILLS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "cumsum": lambda x: x.cumsum(0),
}


def second_backward(operation: Callable[[Tensor], Tensor], x: Tensor) -> str | None:
    """What the second backward through the result says; None if it runs."""
    y = operation(x)
    (y + 1).sum().backward()
    try:
        (y + 1).sum().backward()
    except RuntimeError as error:
        return SECOND if SECOND in str(error) else str(error)
    return None


def leaf() -> Tensor:
    return torch.tensor([1.0, 2.0, 3.0], requires_grad=True)


@pytest.mark.parametrize("stored", [False, True], ids=["no mask", "mask"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_second_backward_is_refused_where_torch_refuses_it(name: str, stored: bool) -> None:
    x, plain = md.as_masked_tensor(leaf(), MASK if stored else None), leaf()
    assert second_backward(OPERATIONS[name], x) == second_backward(OPERATIONS[name], plain.view_as(plain))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.jagged], ids=str)
@pytest.mark.parametrize("name", ["itself", "add", "neg", "clone", "mul", "exp"])
def test_in_sparse_storage_too(name: str, layout: torch.layout) -> None:
    x, plain = md.as_masked_tensor(leaf()[None], MASK[None]), leaf()
    stored = x.to_layout(layout).detach().requires_grad_()
    assert second_backward(OPERATIONS[name], stored) == second_backward(OPERATIONS[name], plain)


@pytest.mark.parametrize("name", WITH_FILLS)
def test_what_fills_saves_its_mask_where_one_is_stored(name: str) -> None:
    assert second_backward(WITH_FILLS[name], md.as_masked_tensor(leaf())) is None
    assert second_backward(WITH_FILLS[name], md.as_masked_tensor(leaf(), MASK)) == SECOND


def test_gradients_of_a_second_backward_add_up() -> None:
    x = leaf()
    a = md.as_masked_tensor(x, MASK)
    for _ in range(2):
        (a + 1).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 0, 2]
