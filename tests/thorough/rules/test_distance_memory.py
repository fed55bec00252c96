"""Distances make no temporary of the size (rows · rows · coordinates), and agree with the loop over pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import masked_dispatch as md


class LargestTemporary(TorchDispatchMode):
    """The number of elements of the largest tensor with memory of its own that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if type(result) is Tensor:
            self.elements = max(self.elements, result.untyped_storage().nbytes() // result.element_size())
        return result


def masked(rows: int, columns: int, seed: int) -> md.MaskedTensor:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, columns, generator=generator) < 0.3
    data = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return md.masked_tensor(torch.where(mask, data, torch.nan), mask)


def by_pairs(x: md.MaskedTensor, y: md.MaskedTensor, p: float) -> tuple[Tensor, Tensor]:
    """Distances (0 where there is none) and mask."""
    both = x.get_mask()[:, None] & y.get_mask()[None]
    difference = (x.to_tensor(0)[:, None] - y.to_tensor(0)[None]) * both
    return torch.linalg.vector_norm(difference, p, -1), both.any(-1)


def assert_close(out: Tensor, x: md.MaskedTensor, y: md.MaskedTensor, p: float) -> None:
    distances, mask = by_pairs(x, y, p)
    assert isinstance(out, md.MaskedTensor)
    assert torch.equal(out.get_mask(), mask)
    torch.testing.assert_close(out.to_tensor(0), distances * mask)


@pytest.mark.parametrize("p", [0.0, 1.0, 1.5, 2.0, torch.inf], ids=str)
@pytest.mark.parametrize("seen", ["dense", "one mask row"])
def test_cdist_is_bounded(p: float, seen: str) -> None:
    x, y = masked(256, 512, 0), masked(256, 512, 1)
    if seen == "one mask row":
        y = md.as_masked_tensor(y.to_tensor(1), y.get_mask()[:1])
    with LargestTemporary() as largest:
        out = torch.cdist(x, y, p)
    assert largest.elements <= 2**21
    assert_close(out, x, y, p)


@pytest.mark.parametrize("p", [1.0, 2.0])
def test_pdist_is_bounded(p: float) -> None:
    x = masked(200, 512, 2)
    with LargestTemporary() as largest:
        out = torch.nn.functional.pdist(x, p)
    assert largest.elements <= 2**21
    distances, mask = by_pairs(x, x, p)
    pairs = torch.triu_indices(200, 200, 1)
    assert torch.equal(out.get_mask(), mask[pairs[0], pairs[1]])
    torch.testing.assert_close(out.to_tensor(0), (distances * mask)[pairs[0], pairs[1]])


MODES = ["use_mm_for_euclid_dist_if_necessary", "use_mm_for_euclid_dist", "donot_use_mm_for_euclid_dist"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [3, 40])
def test_modes_and_batches(mode: str, rows: int) -> None:
    data = [masked(rows, 8, seed) for seed in range(4)]
    x, y = torch.stack(data[:2]), torch.stack(data[2:])
    out = torch.cdist(x, y, compute_mode=mode)
    for n in range(2):
        assert_close(out[n], data[n], data[2 + n], 2.0)


def test_the_derivative_by_products_is_that_of_the_pairs() -> None:
    x, y = masked(40, 6, 0).requires_grad_(), masked(30, 6, 1)
    products = torch.cdist(x, y, compute_mode=MODES[1])
    with LargestTemporary() as largest:
        (grad,) = torch.autograd.grad(products.sum(), x, create_graph=True)
    assert largest.elements <= 40 * 40
    (wanted,) = torch.autograd.grad(torch.cdist(x, y, compute_mode=MODES[2]).sum(), x, create_graph=True)
    torch.testing.assert_close(grad.to_tensor(0), wanted.to_tensor(0))
    (second,) = torch.autograd.grad((grad * grad).sum(), x)
    (wanted_second,) = torch.autograd.grad((wanted * wanted).sum(), x)
    torch.testing.assert_close(second.to_tensor(0), wanted_second.to_tensor(0))


def test_two_equal_rows_have_derivative_zero() -> None:
    x = masked(30, 6, 0).requires_grad_()
    torch.cdist(x, x.detach(), compute_mode=MODES[1]).diagonal().sum().backward()
    assert x.grad is not None
    assert bool(x.grad.to_tensor(0).isfinite().all())


@pytest.mark.parametrize("value", [torch.inf, 1e200])
def test_a_number_without_a_finite_square_counts_where_it_is_common_only(value: float) -> None:
    data, mask = torch.ones(30, 2, dtype=torch.float64), torch.ones(30, 2, dtype=torch.bool)
    data[0, 0] = value
    mask[1, 0] = False
    x, y = md.masked_tensor(data), md.masked_tensor(torch.ones_like(data), mask)
    out = torch.cdist(x, y).to_tensor(-1)
    assert out[0, 1] == 0
    assert out[0, 2] == torch.inf
