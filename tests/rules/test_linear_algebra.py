"""Matrices, systems of equations and transforms, all or nothing for each, against plain torch on those that are whole.

The laws ask it of every function, with derivatives of both orders. Here is what only some elements decide: triangles,
tolerances, pivots, cropped and padded lines, frames; and what is raised.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import masked_dispatch as md
from op_registry import MaskedSemanticsError
from padded_slices import matrices, same, wrapped

aten = torch.ops.aten


# ----------------------------------------------------------------------------------------------------------- one matrix


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


# ----------------------------------------------------------------------------------------------- systems of equations


def systems() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Matrices (4, 3, 3) of which two are whole, and right-hand sides (4, 3, 2) of which one column has a hole."""
    a, a_mask = matrices()
    b = torch.randn(4, 3, 2, dtype=torch.float64)
    b_mask = torch.ones(b.shape, dtype=torch.bool)
    b_mask[2, 1, 0] = False
    return a, a_mask, b, b_mask


@pytest.mark.filterwarnings("ignore:torch.triangular_solve is deprecated")
@pytest.mark.parametrize(("upper", "unitriangular"), itertools.product([True, False], repeat=2))
def test_a_triangular_solve_reads_one_triangle(upper: bool, unitriangular: bool) -> None:
    a, _, b, b_mask = systems()
    read = torch.ones(3, 3, dtype=torch.bool)
    read = read.triu(int(unitriangular)) if upper else read.tril(-int(unitriangular))
    x, y = wrapped(a, read.expand(a.shape), math.nan), wrapped(b, b_mask, math.nan)
    options = {"upper": upper, "unitriangular": unitriangular}
    wanted = torch.linalg.solve_triangular(a, b, **options)
    columns = b_mask.all(1, keepdim=True)
    result = torch.linalg.solve_triangular(x, y, **options)
    same(result, wanted, columns)
    result.sum().backward()
    assert x.grad is not None
    assert x.grad.get_data()[x.get_mask()].isfinite().all()
    solved, copied = torch.triangular_solve(y, x, upper, False, unitriangular)
    same(solved, wanted, columns)
    assert not copied.get_mask().any()


def test_pivots_out_of_range_are_not_read() -> None:
    a, _, b, _ = systems()
    factors, pivots = torch.linalg.lu_factor(a)
    known = torch.tensor([True, False, True, True])[:, None].expand(pivots.shape)
    hidden = md.masked_tensor(torch.where(known, pivots, 1_000_000), known)
    same(torch.linalg.lu_solve(factors, hidden, b), torch.linalg.solve(a, b), known[:, :1, None])
    for mine, plain in zip(torch.lu_unpack(factors, hidden), torch.lu_unpack(factors, pivots), strict=True):
        same(mine, plain, known[:, :1, None])


# --------------------------------------------------------------------------------------------------------- transforms


def test_cropped_elements_are_not_read_and_padding_is_valid() -> None:
    data, mask = torch.randn(2, 8), torch.arange(8) < torch.tensor([[8], [5]])
    x = wrapped(data, mask, math.nan)
    same(torch.fft.rfft(x, n=5), torch.fft.rfft(data, n=5), torch.tensor(True))
    same(torch.fft.rfft(x, n=6), torch.fft.rfft(data, n=6), torch.tensor([[True], [False]]))
    same(torch.fft.fft2(x[:, :5], s=(4, 16)), torch.fft.fft2(data[:, :5], s=(4, 16)), torch.tensor(True))
    spectrum = torch.fft.rfft(torch.randn(2, 16))  # nine entries
    known = torch.arange(9) < torch.tensor([[9], [5]])
    y = wrapped(spectrum, known, math.nan)
    same(torch.fft.irfft(y, n=8), torch.fft.irfft(spectrum, n=8), torch.tensor(True))
    same(torch.fft.irfft(y, n=9), torch.fft.irfft(spectrum, n=9), torch.tensor(True))
    same(torch.fft.irfft(y, n=10), torch.fft.irfft(spectrum, n=10), torch.tensor([[True], [False]]))
    two_sided = aten._fft_c2r(y[:, :8], [1], 2, 8)  # the second half repeats the first
    same(two_sided, torch.fft.irfft(spectrum, n=8), torch.tensor(True))


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("win_length", [16, 8])
def test_the_frames_of_a_padded_waveform(center: bool, win_length: int) -> None:
    torch.manual_seed(0)
    waveform = torch.randn(2, 64, dtype=torch.float64)
    mask = torch.arange(64) < torch.tensor([[64], [40]])
    x = wrapped(waveform, mask, math.nan)
    options: dict[str, Any] = {"n_fft": 16, "hop_length": 4, "win_length": win_length, "center": center}
    options |= {"window": torch.hann_window(win_length, dtype=torch.float64), "return_complex": True}
    spectra, wanted = torch.stft(x, **options), torch.stft(waveform, **options)
    read = mask
    if center:  # what is reflected at the ends is read there
        read = F.pad(mask[None].double(), (8, 8), mode="reflect")[0] > 0
    whole = torch.stack([read[:, 4 * t : 4 * t + 16].all(1) for t in range(wanted.shape[-1])], -1)
    same(spectra, wanted, whole[:, None, :])
    (slope,) = torch.autograd.grad(spectra.abs().square().sum(), x)
    plain = waveform.clone().requires_grad_()
    spectra = torch.stft(plain, **options)
    (expected,) = torch.autograd.grad(spectra[whole[:, None, :].expand(spectra.shape)].abs().square().sum(), plain)
    same(slope, expected, mask)
