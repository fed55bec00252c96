"""Fourier transforms, all or nothing for each line, block and frame, against plain torch on those that are whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from padded_slices import GARBAGE, same, wrapped

aten = torch.ops.aten


REAL: dict[str, Callable[[Tensor], Tensor]] = {
    "rfft": torch.fft.rfft, "fft": torch.fft.fft, "ihfft": torch.fft.ihfft, "ifft": torch.fft.ifft,
    "fftn over rows": lambda x: torch.fft.fftn(x, dim=-1),
}  # fmt: skip


@pytest.mark.parametrize("hidden", GARBAGE)
@pytest.mark.parametrize("name", REAL)
def test_padded_rows_have_no_spectrum(name: str, hidden: float) -> None:
    torch.manual_seed(0)
    data = torch.randn(3, 8, dtype=torch.float64)
    mask = torch.arange(8) < torch.tensor([[8], [5], [0]])
    x = wrapped(data, mask, hidden)
    spectrum = REAL[name](x)
    same(spectrum, REAL[name](data), torch.tensor([[True], [False], [False]]))
    spectrum.abs().square().sum().backward()
    alone = data[:1].clone().requires_grad_()
    REAL[name](alone).abs().square().sum().backward()
    assert x.grad is not None
    assert alone.grad is not None
    same(x.grad, torch.cat([alone.grad, torch.zeros(2, 8)]), mask)


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr", "to_packed"])
def test_spectra_of_sparse_storage(layout: str) -> None:
    data = torch.randn(3, 8)
    mask = torch.arange(8) < torch.tensor([[8], [5], [0]])
    x = getattr(wrapped(data, mask), layout)().without_extent()
    same(torch.fft.rfft(x), torch.fft.rfft(data), torch.tensor([[1], [0], [0]]) > 0)


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


def test_a_block_over_several_dimensions() -> None:
    data = torch.randn(2, 3, 4, 5)
    mask = torch.ones(data.shape, dtype=torch.bool)
    mask[0, 1, 2, 3] = False
    x = wrapped(data, mask, math.nan)
    for dim in ((2, 3), (3, 1), (0,), (-4, -3, -2, -1)):
        wanted = mask.all(dim, keepdim=True)
        same(torch.fft.fftn(x, dim=dim), torch.fft.fftn(data, dim=dim), wanted)
        same(torch.fft.rfftn(x, dim=dim), torch.fft.rfftn(data, dim=dim), wanted)


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


@pytest.mark.filterwarnings("ignore:The length of signal is shorter")
@pytest.mark.parametrize("center", [True, False])
def test_a_sample_of_the_inverse_depends_on_every_frame_that_covers_it(center: bool) -> None:
    torch.manual_seed(0)
    spectra = torch.randn(2, 9, 6, dtype=torch.complex128)
    mask = torch.ones(spectra.shape, dtype=torch.bool)
    mask[1, 3, 4] = False
    options: dict[str, Any] = {"n_fft": 16, "hop_length": 4, "center": center, "length": 50 if center else 40}
    options["window"] = torch.ones(16, dtype=torch.float64)
    x = wrapped(spectra, mask, math.nan)
    first = 8 if center else 0
    known = torch.ones(2, options["length"], dtype=torch.bool)
    known[1, 16 - first : 32 - first] = False
    signal, wanted = torch.istft(x, **options), torch.istft(spectra, **options)
    same(signal, wanted, known)
    (slope,) = torch.autograd.grad(signal.square().sum(), x)
    plain = spectra.clone().requires_grad_()
    (expected,) = torch.autograd.grad(torch.istft(plain, **options)[known].square().sum(), plain)
    same(slope, expected, mask)
    hole = wrapped(options["window"], torch.arange(16) != 3, math.nan)
    assert not torch.istft(spectra, **(options | {"window": hole})).get_mask().any()
