"""torch's reductions and scans, by torch's names, with `skipna` and (for reductions) `min_count`.

Each line names torch's function, its other keyword arguments, and its identity: its value for no elements. Operations
without an identity (a mean, a maximum) do not accept min_count=0. Both options are defined in skipna.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from masked_dispatch.api.skipna import reduce, reduction, scan, with_signature

sum = reduction(torch.sum, "dtype", identity=0)
nansum = reduction(torch.nansum, "dtype", identity=0)
prod = reduction(torch.prod, "dtype", identity=1)
any = reduction(torch.any, identity=False, no_dims_is_elementwise=True)
all = reduction(torch.all, identity=True, no_dims_is_elementwise=True)
logsumexp = reduction(torch.logsumexp, identity=-math.inf)

mean = reduction(torch.mean, "dtype")
nanmean = reduction(torch.nanmean, "dtype")
var = reduction(torch.var, "correction")
std = reduction(torch.std, "correction")
var_mean = reduction(torch.var_mean, "correction")
std_mean = reduction(torch.std_mean, "correction")
amax = reduction(torch.amax)
amin = reduction(torch.amin)
aminmax = reduction(torch.aminmax)
max = reduction(torch.max)
min = reduction(torch.min)
argmax = reduction(torch.argmax)
argmin = reduction(torch.argmin)
median = reduction(torch.median)
nanmedian = reduction(torch.nanmedian)
mode = reduction(torch.mode, dim=-1)

cumsum = scan(torch.cumsum, "dtype")
cumprod = scan(torch.cumprod, "dtype")
cummax = scan(torch.cummax)
cummin = scan(torch.cummin)
logcumsumexp = scan(torch.logcumsumexp)


# ------------------------------------------------------------- functions with an argument before the dimension


def quantile_function(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch's quantile or nanquantile with skipna and min_count."""
    name = function.__name__

    def quantile(
        x: Tensor,
        q: float | Tensor,
        dim: int | None = None,
        keepdim: bool = False,
        *,
        interpolation: str = "linear",
        skipna: bool = True,
        min_count: int = 1,
    ) -> Tensor:
        def call(t: Tensor) -> Tensor:
            return function(t, q, dim, keepdim, interpolation=interpolation)

        return reduce(call, name, x, dim, keepdim, skipna, min_count)

    text = "torch.{name} over the valid elements of each slice; skipna and min_count as for `mean`."
    return with_signature(quantile, name, (), text)


quantile = quantile_function(torch.quantile)
nanquantile = quantile_function(torch.nanquantile)


def kthvalue(
    x: Tensor, k: int, dim: int = -1, keepdim: bool = False, *, skipna: bool = True, min_count: int = 1
) -> tuple[Tensor, Tensor]:
    """torch.kthvalue over the valid elements of each slice, invalid if there are fewer than k.

    skipna and min_count as for `mean`.
    """
    return reduce(lambda t: torch.kthvalue(t, k, dim, keepdim), "kthvalue", x, dim, keepdim, skipna, min_count)


def vector_norm(
    x: Tensor,
    ord: float = 2,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    skipna: bool = True,
    min_count: int = 1,
) -> Tensor:
    """torch.linalg.vector_norm over the valid elements of each slice; skipna and min_count as for `sum`.

    The norm of no elements is 0 for a finite order ≥ 0; other orders do not accept min_count=0.
    """

    def call(t: Tensor) -> Tensor:
        return torch.linalg.vector_norm(t, ord, dim, keepdim, dtype=dtype)

    identity = 0 if 0 <= ord < math.inf else None
    return reduce(call, "vector_norm", x, dim, keepdim, skipna, min_count, identity)
