"""Reductions and sorts under a mask that excludes nothing raise, and choose among ties, as torch does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import masked_dispatch as md

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
)
# Values and an index that each names.
INDEXED: dict[str, Callable[[Tensor], Any]] = {
    "topk": lambda x: x.topk(3, 1),
    "topk unsorted": lambda x: x.topk(3, 1, sorted=False),
    "smallest": lambda x: x.topk(x.shape[1] // 2, 1, largest=False),
    "kthvalue": lambda x: x.kthvalue(x.shape[1] // 2, 1),
    "median": lambda x: x.median(1),
    "nanmedian": lambda x: x.nanmedian(1),
    "mode": lambda x: x.mode(1),
    "sort": lambda x: x.sort(1),
    "descending": lambda x: x.sort(1, descending=True),
    "argsort": lambda x: (x, x.argsort(1)),
    "max": lambda x: x.max(1),
    "min": lambda x: x.min(1),
    "argmax": lambda x: (x, x.argmax(1)),
    "cummax": lambda x: x.cummax(1),
    "cummin": lambda x: x.cummin(1),
}
OTHERS: dict[str, Callable[[Tensor], Any]] = {
    "median of all": torch.median,
    "nanmedian of all": torch.nanmedian,
    "argmin": torch.argmin,
    "amax": lambda x: x.amax(1),
    "aminmax": lambda x: x.aminmax(dim=1),
    "sum": lambda x: x.sum(1),
    "prod": lambda x: x.prod(1),
    "mean": lambda x: x.mean(1),
    "var": lambda x: x.var(1),
    "any": lambda x: x.any(1),
    "norm": lambda x: x.norm(dim=1),
    "vector_norm": torch.linalg.vector_norm,
    "logsumexp": lambda x: x.logsumexp(1),
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "quantile": lambda x: x.quantile(0.5, 1),
    "nansum": lambda x: x.nansum(1),
    "nanmean": lambda x: x.nanmean(1),
    "softmax": lambda x: x.softmax(1),
    "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: x.cumprod(1),
    "cov": torch.cov,
    "corrcoef": torch.corrcoef,
    "renorm": lambda x: x.renorm(2, 0, 1.0),
    "histc": lambda x: x.histc(3),
    "unique": torch.unique,
    "trapezoid": torch.trapezoid,
}


def raised(call: Callable[[Tensor], Any], x: Tensor) -> type | None:
    try:
        call(x)
    except Exception as error:  # of any type: compared
        return type(error)
    return None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_dtype_that_torch_refuses_is_refused_under_a_mask(dtype):
    data = torch.tensor([[1, 0, 1, 2, 0, 1], [1, 1, 0, 3, 1, 1]]).to(dtype)
    whole, holey = torch.ones(2, 6, dtype=torch.bool), torch.tensor([[True] * 6, [True, False] * 3])
    for name, call in {**INDEXED, **OTHERS}.items():
        expected = raised(call, data)
        assert (raised(call, md.masked_tensor(data, whole)) is None) is (expected is None), name
        assert expected is None or raised(call, md.masked_tensor(data, holey)) is not None, name


@pytest.mark.parametrize("name", INDEXED)
def test_of_equal_elements_torchs_choice_is_named_where_all_are_valid(name):
    generator = torch.Generator().manual_seed(0)
    for size in (6, 7, 20, 100):
        for dtype in (torch.float32, torch.int64):
            data = torch.randint(0, 3, (4, size), generator=generator).to(dtype)
            index = INDEXED[name](md.masked_tensor(data, torch.ones(4, size, dtype=torch.bool)))[1]
            assert torch.equal(index.to_tensor(-1), INDEXED[name](data)[1]), (size, dtype)
