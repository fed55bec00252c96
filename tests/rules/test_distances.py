"""Differences and distances, against loops over what is valid."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from op_registry.errors import MaskedSemanticsError

NAN = math.nan


def masked(shape: tuple[int, ...], seed: int, share: float = 0.6) -> tuple[Tensor, Tensor]:
    """Random data in double precision, NaN wherever the random mask is False."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(shape, generator=generator) < share
    data = torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.where(mask, data, NAN), mask


def wrapped(data: Tensor, mask: Tensor) -> Tensor:
    return md.masked_tensor(data, mask, requires_grad=True)


# ---------------------------------------------------------------------------------------------------------------- order


def test_a_short_kernel_does_not_pass_a_rule_by() -> None:
    """bucketize is elementwise in its values, but boundaries with a gap are refused, of whatever shape."""
    values, mask = torch.tensor([0.5, 1.5]), torch.tensor([True, False])
    gap = md.masked_tensor(torch.tensor([1.0, 2.0]), mask)
    with pytest.raises(MaskedSemanticsError, match="an invalid element has no position in an order"):
        torch.bucketize(md.masked_tensor(values, mask), gap)


# ------------------------------------------------------------------------------------------------------ differences


def test_a_component_of_a_cross_product_reads_the_two_others() -> None:
    (a, m), (b, n) = masked((5, 3), 0), masked((5, 3), 1)
    x, y = wrapped(a, m), wrapped(b, n)
    out = torch.linalg.cross(x, y)
    both = m & n
    assert torch.equal(out.get_mask(), both.roll(-1, 1) & both.roll(-2, 1))
    torch.testing.assert_close(out.get_data()[out.get_mask()], torch.linalg.cross(a, b)[out.get_mask()])
    out.sum().backward()
    assert x.grad is not None
    assert bool(x.grad.get_data()[m].isfinite().all())


def test_what_a_component_does_not_read_has_no_part_in_its_derivative() -> None:
    x = wrapped(torch.tensor([[NAN, 2.0, 3.0]]), torch.tensor([[False, True, True]]))
    torch.linalg.cross(x, torch.tensor([[math.inf, 5.0, 7.0]])).sum().backward()
    assert x.grad is not None
    assert x.grad.get_data()[0, 1:].tolist() == [7.0, -5.0]


@pytest.mark.parametrize("spaced", [False, True])
def test_a_trapezoid_sums_the_intervals_whose_ends_are_valid(spaced: bool) -> None:
    y, m = masked((4, 6), 3)
    points = torch.arange(6, dtype=torch.float64) ** 2
    out = torch.trapezoid(wrapped(y, m), points, dim=1) if spaced else torch.trapezoid(wrapped(y, m), dx=2, dim=1)
    for row in range(4):
        parts = [
            (y[row, i] + y[row, i + 1]) / 2 * (points[i + 1] - points[i] if spaced else 2)
            for i in range(5)
            if m[row, i] and m[row, i + 1]
        ]
        assert bool(out.get_mask()[row]) == bool(parts)
        if parts:
            torch.testing.assert_close(out.get_data()[row], sum(parts[1:], parts[0]))


@pytest.mark.parametrize("layout", ("dense", "to_sparse", "to_sparse_csr"))
@pytest.mark.parametrize("spaced", (False, True))
@pytest.mark.parametrize("hidden", (NAN, math.inf, torch.finfo(torch.float64).max))
def test_a_trapezoid_of_one_point_reads_nothing(hidden: float, spaced: bool, layout: str) -> None:
    """It has no interval, so it is torch's 0; torch computes that from the point."""
    y = md.masked_tensor(
        torch.tensor([[1.0], [hidden]], dtype=torch.float64), torch.tensor([[True], [False]]), requires_grad=True
    )
    stored = y if layout == "dense" else getattr(y, layout)()
    points = md.masked_tensor(torch.tensor([hidden], dtype=torch.float64), torch.tensor([False]))
    out = torch.trapezoid(stored, points, dim=1) if spaced else torch.trapezoid(stored, dx=2, dim=1)
    assert out.to_tensor(5).tolist() == [0.0, 0.0]
    out.sum().backward()
    assert y.grad is not None
    assert y.grad.to_tensor(5).tolist() == [[0.0], [5.0]]


def test_a_trace_sums_the_valid_diagonal() -> None:
    x = md.masked_tensor(torch.tensor([[1.0, 2.0], [3.0, NAN]]), torch.tensor([[True, True], [False, False]]))
    assert torch.trace(x).item() == 1.0
    assert not torch.trace(md.masked_tensor(torch.eye(2), ~torch.eye(2, dtype=torch.bool))).get_mask()


# -------------------------------------------------------------------------------------------------------- distances


def by_pairs(
    pairs: list[tuple[Tensor, Tensor, Tensor]], one: Callable[[Tensor, Tensor], Tensor]
) -> list[Tensor | None]:
    """`one` on each pair of vectors, of which only the coordinates of the third are there; None where none is."""
    return [one(a[both], b[both]) if bool(both.any()) else None for a, b, both in pairs]


def assert_same_with_derivatives(out: Tensor, wanted: list[Tensor | None], mine: Tensor, plain: Tensor) -> None:
    """Values, masks, first and second derivatives of the sum of squares."""
    assert out.get_mask().flatten().tolist() == [w is not None for w in wanted]
    values = torch.stack([w for w in wanted if w is not None])
    torch.testing.assert_close(out.get_data()[out.get_mask()], values)
    (first,) = torch.autograd.grad((out * out).sum(), mine, create_graph=True)
    (wanted_first,) = torch.autograd.grad((values * values).sum(), plain, create_graph=True)
    mask = mine.get_mask()
    assert torch.equal(first.get_mask(), mask)
    torch.testing.assert_close(first.get_data()[mask], wanted_first[mask])
    (second,) = torch.autograd.grad((first * first * first).sum(), mine)
    (wanted_second,) = torch.autograd.grad((wanted_first**3).sum(), plain)
    torch.testing.assert_close(second.get_data()[mask], wanted_second[mask])


@pytest.mark.parametrize("p", [1.5, 2.0, 3.0])
def test_cdist_is_over_common_coordinates(p: float) -> None:
    (a, m), (b, n) = masked((5, 4), 5, 0.4), masked((3, 4), 6, 0.4)
    x, plain = wrapped(a, m), a.clone().requires_grad_()
    pairs = [(plain[i], b[j], m[i] & n[j]) for i in range(5) for j in range(3)]
    wanted = by_pairs(pairs, lambda u, v: torch.linalg.vector_norm(u - v, p))
    assert None in wanted
    assert_same_with_derivatives(torch.cdist(x, md.masked_tensor(b, n), p), wanted, x, plain)


def test_pdist_is_over_common_coordinates() -> None:
    a, m = masked((6, 3), 7, 0.4)
    x, plain = wrapped(a, m), a.clone().requires_grad_()
    pairs = [(plain[i], plain[j], m[i] & m[j]) for i in range(6) for j in range(i + 1, 6)]
    wanted = by_pairs(pairs, lambda u, v: torch.linalg.vector_norm(u - v))
    assert None in wanted
    assert_same_with_derivatives(torch.nn.functional.pdist(x), wanted, x, plain)


def test_cosine_similarity_is_over_common_coordinates() -> None:
    (a, m), (b, n) = masked((6, 4), 9, 0.4), masked((1, 4), 10, 0.8)
    x, plain = wrapped(a, m), a.clone().requires_grad_()
    pairs = [(plain[i], b[0], m[i] & n[0]) for i in range(6)]
    wanted = by_pairs(pairs, lambda u, v: torch.cosine_similarity(u, v, 0))
    assert_same_with_derivatives(torch.cosine_similarity(x, md.masked_tensor(b, n)), wanted, x, plain)


def test_losses_of_vectors_agree_with_their_distances() -> None:
    (a, m), (b, n), (c, o) = masked((5, 4), 11), masked((5, 4), 12), masked((5, 4), 13)
    x, y, z = md.masked_tensor(a, m), md.masked_tensor(b, n), md.masked_tensor(c, o)
    away = torch.full((5,), -1.0)
    loss = torch.nn.functional.cosine_embedding_loss(x, y, away, reduction="none")
    close = torch.cosine_similarity(x, y).clamp(min=0)
    assert torch.equal(loss.get_mask(), close.get_mask())
    torch.testing.assert_close(loss.to_tensor(0), close.to_tensor(0))
    triplet = torch.nn.functional.triplet_margin_loss(x, y, z, reduction="none")
    far = (1 + torch.pairwise_distance(x, y) - torch.pairwise_distance(x, z)).clamp(min=0)
    assert torch.equal(triplet.get_mask(), far.get_mask())
    torch.testing.assert_close(triplet.to_tensor(0), far.to_tensor(0))
