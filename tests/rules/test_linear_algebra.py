"""Matrices and systems of equations, all or nothing for each, against plain torch on those that are whole."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from functions_of_one_matrix import OF_ONE_MATRIX
from op_registry import MaskedSemanticsError
from padded_slices import GARBAGE, matrices, same, wrapped

aten = torch.ops.aten


# ----------------------------------------------------------------------------------------------------------- one matrix


WHOLE = [0, 2]


@pytest.mark.parametrize(("name", "hidden"), zip(OF_ONE_MATRIX, itertools.cycle(GARBAGE), strict=False))
def test_a_batch_with_a_padded_matrix(name: str, hidden: float) -> None:
    """Whole matrices give what they give without the others, and so do two derivatives; nothing is raised."""
    function = OF_ONE_MATRIX[name]
    data, mask = matrices()
    x = wrapped(data, mask, hidden)
    alone = data[WHOLE].clone().requires_grad_()
    with torch.autograd.set_detect_anomaly(True):
        result, wanted = function(x), function(alone)
        whole = mask.flatten(1).all(1)
        assert torch.equal(result.get_mask(), whole.reshape(-1, *[1] * (result.ndim - 1)).expand(result.shape))
        torch.testing.assert_close(result.get_data()[WHOLE], wanted)
        slopes = [torch.autograd.grad(scalar(r), t, create_graph=True)[0] for r, t in ((result, x), (wanted, alone))]
        same(slopes[0], put_back(slopes[1], data), mask)
        bends = [torch.autograd.grad(scalar(s), t)[0] for s, t in zip(slopes, (x, alone), strict=True)]
    same(bends[0], put_back(bends[1], data), mask)


def scalar(result: Tensor) -> Tensor:
    """A number that every element takes part in with a weight of its own, the same for a slice in any batch."""
    squares = (result * result.conj()).real if result.is_complex() else result * result
    weights = torch.arange(1.0, squares[0].numel() + 1, dtype=torch.float64).reshape(squares.shape[1:])
    return (squares * weights).sum()


def put_back(slopes: Tensor, data: Tensor) -> Tensor:
    """Gradients of the whole matrices in their places among all, zero elsewhere."""
    return torch.zeros_like(data).index_copy(0, torch.tensor(WHOLE), slopes)


def test_every_result_of_a_matrix_shares_its_validity() -> None:
    data, mask = matrices()
    x = wrapped(data, mask, math.nan)
    results = [
        *aten.linalg_inv_ex(x), *aten.linalg_lu_factor_ex(x), *aten._linalg_det(x), *aten._linalg_slogdet(x),
        *aten.linalg_cholesky_ex(x), *torch.linalg.eigh(x), *torch.linalg.svd(x), *torch.linalg.qr(x),
        *torch.linalg.lu(x), torch.linalg.matrix_rank(x),
    ]  # fmt: skip
    whole = torch.tensor([True, False, True, False])
    for result in results:
        assert torch.equal(result.get_mask(), whole.reshape(-1, *[1] * (result.ndim - 1)).expand(result.shape))


def test_a_valid_matrix_that_is_singular_raises_as_in_torch() -> None:
    data, mask = matrices()
    data[2] = 0
    with pytest.raises(torch.linalg.LinAlgError, match="Batch element 2"):
        torch.linalg.inv(wrapped(data, mask))
    mask[2, 0, 0] = False
    assert torch.linalg.inv(wrapped(data, mask)).get_mask()[:, 0, 0].tolist() == [True, False, False, False]


@pytest.mark.parametrize("function", [torch.linalg.inv, torch.linalg.cholesky, torch.linalg.lu_factor])
def test_an_out_form_raises_nothing_for_what_is_missing(function: Callable[..., Any]) -> None:
    data, mask = matrices()
    x = md.masked_tensor(torch.where(mask, data, math.nan), mask)
    wanted = function(x)
    several = isinstance(wanted, tuple)
    out = [md.masked_tensor(torch.empty_like(r.get_data())) for r in (wanted if several else [wanted])]
    function(x, out=tuple(out) if several else out[0])
    for mine, theirs in zip(out, wanted if several else [wanted], strict=True):
        same(mine, theirs.get_data(), theirs.get_mask())


def test_large_matrices_and_all_of_their_functions_stay_finite() -> None:
    x = wrapped(torch.zeros(1, 200, 200), torch.zeros(1, dtype=torch.bool).reshape(1, 1, 1).expand(1, 200, 200))
    for function in (torch.linalg.det, torch.linalg.matrix_exp, torch.linalg.eigvalsh, torch.linalg.inv):
        result = function(x)
        assert result.count() == 0
        assert result.get_data().isfinite().all()


def test_a_power_is_the_product_that_it_stands_for() -> None:
    data, mask = matrices()
    x = wrapped(data, mask)
    assert torch.linalg.matrix_power(x, 0).get_mask().all()
    for power in (torch.linalg.matrix_power, torch.matrix_power):
        for n, product in enumerate((x, x @ x, x @ x @ x, x @ x @ x @ x), 1):
            for stored in (x, x.to_sparse(), x.to_sparse(sparse_dim=1)):
                found = power(stored, n).to_dense()
                assert torch.equal(found.get_mask(), product.get_mask())
                torch.testing.assert_close(found.to_tensor(0), product.to_tensor(0))


def test_a_negative_power_needs_the_whole_matrix() -> None:
    data, mask = matrices()
    whole = mask.flatten(-2).all(-1)[..., None, None].expand(mask.shape)
    assert torch.equal(torch.linalg.matrix_power(wrapped(data, mask), -2).get_mask(), whole)


def test_rank_and_pseudo_inverse_depend_on_their_tolerances() -> None:
    data, _ = matrices()
    known = torch.tensor([True, True, False, True])
    tolerances = md.masked_tensor(torch.where(known, 1e-6, math.nan).double(), known)
    same(torch.linalg.matrix_rank(data, atol=tolerances), torch.full((4,), 3), known)
    same(torch.linalg.pinv(data, rtol=tolerances), torch.linalg.pinv(data), known[:, None, None])


def test_an_empty_matrix_has_nothing_that_could_be_missing() -> None:
    x = md.masked_tensor(torch.zeros(2, 0, 0), torch.zeros(2, 0, 0, dtype=torch.bool))
    same(torch.linalg.det(x), torch.ones(2), torch.tensor(True))


def test_forward_mode_passes_no_replacement() -> None:
    data, mask = matrices()
    x = md.masked_tensor(data, mask)
    tangent = md.masked_tensor(torch.where(mask, 1.0, math.nan).double(), mask)
    value, slope = md.functional.jvp(torch.linalg.inv, (x,), (tangent,))
    _, wanted = torch.func.jvp(torch.linalg.inv, (data,), (torch.ones_like(data),))
    same(slope, wanted, mask.flatten(1).all(1)[:, None, None])
    assert torch.equal(value.get_mask(), slope.get_mask())


# --------------------------------------------------------------------------------------------------- what stays refused


def partly(shape: Sequence[int]) -> Tensor:
    mask = torch.ones(tuple(shape), dtype=torch.bool)
    mask.view(-1)[-1] = False
    return md.masked_tensor(torch.randn(tuple(shape)), mask)


def test_raw_factors_are_refused() -> None:
    x = partly((2, 3, 3))
    for call in (torch.geqrf, torch.linalg.ldl_factor, lambda a: torch.linalg.householder_product(a, a[..., 0])):
        with pytest.raises(
            MaskedSemanticsError, match=r"no meaning on partly valid input \(raw factors are an encoding"
        ):
            call(x)
