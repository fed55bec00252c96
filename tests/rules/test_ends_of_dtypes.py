"""Statistics, interpolations and normalisations of values near the end of their dtype, under both default dtypes.

The oracle is plain torch on the valid values alone (P2), whatever torch.set_default_dtype says. Where torch overflows
itself, nothing is asked but that what it gives as a finite number is one here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import masked_dispatch as md
from masked_dispatch import missing

Call = Callable[[Tensor], Any]
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

# Of (1, n), n the number of valid elements, to results for the row, or for each of its elements.
OF_ROWS: dict[str, Call] = {
    "mean": lambda x: x.mean(1),
    "sum": lambda x: x.sum(1),
    "var": lambda x: x.var(1),
    "std": lambda x: x.std(1),
    "var_mean": lambda x: torch.var_mean(x, 1, correction=0),
    "std_mean": lambda x: torch.std_mean(x, 1),
    "var of all": lambda x: x.var(),
    "std of all": lambda x: x.std(),
    "median": lambda x: x.median(1).values,
    "quantile": lambda x: x.quantile(0.5, 1),
    "amax": lambda x: x.amax(1),
    "norm": lambda x: x.norm(dim=1),
    "norm of order 1": lambda x: x.norm(1, dim=1),
    "logsumexp": lambda x: x.logsumexp(1),
    "cov": lambda x: torch.cov(x),
    "average": lambda x: F.adaptive_avg_pool1d(x.unsqueeze(0), 1),
}
OF_ELEMENTS: dict[str, Call] = {
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(1),
    "normalize": lambda x: F.normalize(x),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "group_norm": lambda x: F.group_norm(x.unsqueeze(0), 1).squeeze(0),
    "instance_norm": lambda x: F.instance_norm(x.unsqueeze(0)).squeeze(0),
    "batch_norm": lambda x: F.batch_norm(x.t(), None, None, training=True).t(),
    "cumsum": lambda x: x.cumsum(1),
}
# Those whose result may be a difference of numbers as large as the values.
CANCELLING = ("mean", "sum", "var_mean", "std_mean", "average", "cumsum")
# Fractions of the largest number.
PATTERNS = (
    [0.9] * 3,
    [1.0] * 5,
    [0.9, 0.8, 0.7],
    [0.9, -0.9],
    [0.6, 0.5, -0.4, 0.3],
    [0.4, -0.4],
    [0.05, -0.05, 0.01],
    [0.9] * 40,
    [-0.3, 0.3] * 20,
    [0.9, 1e-30, -1e-30],
    [0.3, 0.0, 0.0],
)


def data(dtype: torch.dtype) -> Iterator[Tensor]:
    for pattern in PATTERNS:
        yield (torch.tensor(pattern, dtype=torch.float64) * torch.finfo(dtype).max).to(dtype)


def with_holes(values: Tensor) -> tuple[md.MaskedTensor, Tensor]:
    """(1, 2n) with the values in every second place and NaN, invalid, in the others; and the mask."""
    row = torch.stack([values, torch.full_like(values, torch.nan)], 1).reshape(1, -1)
    mask = ~row.isnan()
    return md.masked_tensor(row, mask), mask


def parts(result: Any) -> tuple[Tensor, ...]:
    return tuple(result) if isinstance(result, tuple) else (result,)


def different(got: Tensor, want: Tensor, scale: float) -> bool:
    """Whether finite numbers of plain torch are others here, beyond a few roundings; dtypes and shapes are exact.

    scale  the magnitude of what cancels in them
    """
    finite = want.isfinite()
    got, want, rounding = got.double()[finite], want.double()[finite], 16 * torch.finfo(got.dtype).eps
    return bool(((got - want).abs() > rounding * want.abs().clamp(min=scale)).any() or got.isnan().any())


def faults(dtype: torch.dtype) -> Iterator[str]:
    for values in data(dtype):
        x, mask = with_holes(values)
        for name, call in {**OF_ROWS, **OF_ELEMENTS}.items():
            try:
                wanted = parts(call(values.unsqueeze(0)))
            except (RuntimeError, ValueError):
                continue  # torch has no such function for the dtype, or for so few elements
            exact = parts(call(values.double().unsqueeze(0)))  # torch's sums in half precision lose more than ours
            for got, want, wide in zip(parts(call(x)), wanted, exact, strict=True):
                plain = got.get_data()[mask].unsqueeze(0) if name in OF_ELEMENTS else got.to_tensor(0)
                assert plain.dtype is want.dtype
                assert plain.shape == want.shape
                scale = float(values.abs().max()) if name in CANCELLING else 1e-3
                if different(plain, want, scale) and different(plain, wide.to(want.dtype), scale):
                    yield f"{name} of {values[:5].tolist()}… in {dtype}: {plain.tolist()} instead of {want.tolist()}"
        yield ""


def interpolation_faults(dtype: torch.dtype) -> Iterator[str]:
    """The same for `missing.interpolate`, against exact fractions, and for `F.interpolate` with a stored mask."""
    largest = torch.finfo(dtype).max
    for first, last in ((0.9, 0.9), (0.9, 0.3), (-1.0, 1.0), (0.9, -0.9), (1e-30, 1.0)):
        a, b = (torch.tensor(f * largest, dtype=torch.float64).to(dtype) for f in (first, last))
        row = torch.stack([a, *[torch.full_like(a, torch.nan)] * 2, b])
        got = missing.interpolate(md.from_nan(row), 0).to_tensor(0)
        exact = [Fraction(a.item()) + (Fraction(b.item()) - Fraction(a.item())) * n / 3 for n in range(4)]
        want = torch.tensor([float(e) for e in exact], dtype=torch.float64).to(dtype)
        if different(got, want, largest):
            yield f"interpolate of {row.tolist()} in {dtype}: {got.tolist()} instead of {want.tolist()}"
        plain = torch.stack([a, b]).view(1, 1, 2)
        stored = md.masked_tensor(plain, torch.ones(1, 1, 2, dtype=torch.bool))
        got, want = (F.interpolate(t, 5, mode="linear") for t in (stored, plain))
        if different(got.to_tensor(0), want, largest):
            yield f"linear of {plain.tolist()} in {dtype}: {got.to_tensor(0).tolist()} instead of {want.tolist()}"


@pytest.fixture(params=[torch.float32, torch.float64], ids=lambda d: f"default {str(d)[6:]}")
def default_dtype(request):
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("default_dtype")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics_and_normalisations_overflow_where_torch_does_alone(dtype):
    found = list(faults(dtype))
    assert not any(found), "\n".join(filter(None, found))
    assert len(found) == len(PATTERNS)


@pytest.mark.usefixtures("default_dtype")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_interpolations_overflow_where_torch_does_alone(dtype):
    assert not list(interpolation_faults(dtype))


def test_the_mean_of_large_numbers_is_finite_in_each_storage():
    x = md.masked_tensor([[3e38, 3e38, 3e38, 0.0]], [[True, True, True, False]])
    for stored in (x, x.to_sparse(), x.to_sparse_csr(), x.to_sparse(sparse_dim=1)):
        var, mean = torch.var_mean(stored, 1)
        assert (var.item(), mean.item()) == (0, pytest.approx(3e38))


def test_the_running_mean_beside_an_infinite_element_is_infinite():
    x = torch.tensor([[1.0], [-torch.inf], [2.0], [0.0]])
    running, expected = torch.zeros(1), torch.zeros(1)
    mask = torch.tensor([[True], [True], [True], [False]])
    F.batch_norm(md.masked_tensor(x, mask), running, torch.ones(1), training=True)
    F.batch_norm(x[:3], expected, torch.ones(1), training=True)
    assert running.item() == expected.item() == -torch.inf
