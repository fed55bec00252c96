"""Values near the end of their dtype, under both default dtypes, against plain torch on the valid values alone."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import masked_dispatch as md
from ends_of_dtypes import DTYPES, PATTERNS, faults, interpolation_faults


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
