"""torch's reductions and scans, by torch's names, with `skipna` and (for reductions) `min_count`.

Each line names torch's function, what it is called with (skipna.py), and its identity: its value for no elements.
Operations without an identity (a mean, a maximum) do not accept min_count=0. Both options are defined in skipna.py."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from masked_dispatch.api.skipna import (
    ValuesAndIndices,
    along_dim,
    along_dim_in_dtype,
    chosen,
    chosen_along_dim,
    chosen_over_one_dim,
    index_over_one_dim,
    least_and_greatest,
    over_dims,
    over_dims_corrected,
    over_dims_given,
    over_dims_in_dtype,
    over_one_dim_in_dtype,
    reduce,
    reduction,
    scan,
    two_over_dims_corrected,
)
from masked_dispatch.compiler_internals import never_compiled
from masked_dispatch.engine_internals import delegating
from masked_dispatch.tensor.masked_tensor import MaskedTensor

sum = reduction(torch.sum, over_dims_in_dtype, identity=0)
nansum = reduction(torch.nansum, over_dims_in_dtype, identity=0)
prod = reduction(torch.prod, over_one_dim_in_dtype, identity=1)
any = reduction(torch.any, over_dims, identity=False, no_dims_is_elementwise=True)
all = reduction(torch.all, over_dims, identity=True, no_dims_is_elementwise=True)
logsumexp = reduction(torch.logsumexp, over_dims_given, identity=-math.inf)

mean = reduction(torch.mean, over_dims_in_dtype)
nanmean = reduction(torch.nanmean, over_dims_in_dtype)
var = reduction(torch.var, over_dims_corrected)
std = reduction(torch.std, over_dims_corrected)
var_mean = reduction(torch.var_mean, two_over_dims_corrected)
std_mean = reduction(torch.std_mean, two_over_dims_corrected)
amax = reduction(torch.amax, over_dims)
amin = reduction(torch.amin, over_dims)
aminmax = reduction(torch.aminmax, least_and_greatest)
max = reduction(torch.max, chosen)
min = reduction(torch.min, chosen)
argmax = reduction(torch.argmax, index_over_one_dim)
argmin = reduction(torch.argmin, index_over_one_dim)
median = reduction(torch.median, chosen)
nanmedian = reduction(torch.nanmedian, chosen)
mode = reduction(torch.mode, chosen_over_one_dim)

cumsum = scan(torch.cumsum, along_dim_in_dtype)
cumprod = scan(torch.cumprod, along_dim_in_dtype)
cummax = scan(torch.cummax, chosen_along_dim)
cummin = scan(torch.cummin, chosen_along_dim)
logcumsumexp = scan(torch.logcumsumexp, along_dim)


# ------------------------------------------------------------- functions with an argument before the dimension


def quantile(
    x: Tensor,
    q: float | Tensor,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    interpolation: str = "linear",
    skipna: bool = True,
    min_count: int | None = None,
) -> Tensor:
    """torch.quantile over the valid elements of each slice; skipna and min_count as for `mean`."""

    def call(t: Tensor) -> Tensor:
        return torch.quantile(t, q, dim, keepdim, interpolation=interpolation)

    return reduce(call, "quantile", x, dim, keepdim, skipna, min_count)


def nanquantile(
    x: Tensor,
    q: float | Tensor,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    interpolation: str = "linear",
    skipna: bool = True,
    min_count: int | None = None,
) -> Tensor:
    """torch.nanquantile over the valid elements of each slice; skipna and min_count as for `mean`."""

    def call(t: Tensor) -> Tensor:
        return torch.nanquantile(t, q, dim, keepdim, interpolation=interpolation)

    return reduce(call, "nanquantile", x, dim, keepdim, skipna, min_count)


def kthvalue(
    x: Tensor, k: int, dim: int = -1, keepdim: bool = False, *, skipna: bool = True, min_count: int | None = None
) -> ValuesAndIndices:
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
    min_count: int | None = None,
) -> Tensor:
    """torch.linalg.vector_norm over the valid elements of each slice; skipna and min_count as for `sum`.

    The norm of no elements is 0 for a finite order ≥ 0; other orders do not accept min_count=0.
    """

    def call(t: Tensor) -> Tensor:
        return torch.linalg.vector_norm(t, ord, dim, keepdim, dtype=dtype)

    identity = 0 if 0 <= ord < math.inf else None
    return reduce(call, "vector_norm", x, dim, keepdim, skipna, min_count, identity)


# ------------------------------------------------ methods of masked tensors that say where `skipna` and `min_count` are


def naming_the_function(name: str, options: tuple[str, ...]) -> Callable[..., Any]:
    """torch's method, which names the library's function if it is given one of its options."""
    method: Callable[..., Any] = getattr(torch.Tensor, name)

    @delegating  # so that rules inside a Python function see who called the method
    @functools.wraps(method)
    @never_compiled
    def reduced(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            for option in options:
                if option in kwargs:
                    raise TypeError(
                        f"x.{name}() is torch's method and has no {option}; use masked_dispatch.{name}(x, ..., "
                        f"{option}={kwargs[option]!r})"
                    )
        return method(self, *args, **kwargs)

    return reduced


def install() -> None:
    """Called once, when the package is imported."""
    for name, function in list(globals().items()):
        if hasattr(torch.Tensor, name) and inspect.isfunction(function):
            options = tuple(o for o in ("skipna", "min_count") if o in inspect.signature(function).parameters)
            if options:
                setattr(MaskedTensor, name, naming_the_function(name, options))
