"""Sums, means, variances and counts over the valid elements of all ranks, and losses that weigh ranks by them.

Each is what one process would compute of all elements, however they are divided among the ranks; a rank may have none.
All ranks of the group have to call it. The derivative is that of the sum of what all ranks compute from the result, as in
torch.distributed.nn: under DistributedDataParallel, which averages gradients, and where every rank's loss is the result,
that gives the gradient of one process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from masked_dispatch.distributed.agreement import Description, agree
from masked_dispatch.tensor.cache_key import CODE_VERSION
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry import registry
from op_registry.records.dtypes import accumulation_dtype

Dims = int | tuple[int, ...] | None


def count(x: Tensor, dim: Dims = None, keepdim: bool = False, *, group: ProcessGroup | None = None) -> Tensor:
    """The number of valid elements on all ranks, over `dim` of each: a plain int64 tensor.

    dim  the dimensions to count over; the ranks' tensors may differ in these. All by default
    """
    local = counted(x, dim, keepdim)
    total = local.clone()
    group = joined_by(group, "count", x, local)
    distributed.all_reduce(total, group=group)
    return total


def sum(x: Tensor, dim: Dims = None, keepdim: bool = False, *, group: ProcessGroup | None = None) -> MaskedTensor:
    """The sum of the valid elements of all ranks, over `dim` of each; invalid where no rank has one.

    dim  the dimensions to sum over; the ranks' tensors may differ in these. All by default

    Half precision is summed in float32 and rounded once. Integers are summed in int64.
    """
    total, n = totals(x, "sum", dim, keepdim, group)
    return masked(total.to(result_dtype(x)), n)


def mean(x: Tensor, dim: Dims = None, keepdim: bool = False, *, group: ProcessGroup | None = None) -> MaskedTensor:
    """The mean of the valid elements of all ranks, over `dim` of each; invalid where no rank has one.

    dim  the dimensions to average over; the ranks' tensors may differ in these. All by default
    """
    check_floating("mean", x)
    total, n = totals(x, "mean", dim, keepdim, group)
    return masked((total / n.clamp(min=1)).to(x.dtype), n)


def var(
    x: Tensor, dim: Dims = None, keepdim: bool = False, *, correction: int = 1, group: ProcessGroup | None = None
) -> MaskedTensor:
    """The variance of the valid elements of all ranks, over `dim` of each; invalid where no rank has one.

    dim         the dimensions to compute it over; the ranks' tensors may differ in these. All by default
    correction  what is subtracted from the number of elements; the variance of one is NaN, as in torch
    """
    check_floating("var", x)
    wide = x.to(accumulation_dtype(x.dtype))
    total, n = totals(wide, "var", dim, True, group)
    squares, _ = totals((wide - total / n.clamp(min=1)) ** 2, "var", dim, keepdim, group)
    n = n.view(squares.shape)
    return masked((squares / (n - correction).clamp(min=0)).to(x.dtype), n)


def mean_loss(losses: Tensor, weights: Tensor | None = None, *, group: ProcessGroup | None = None) -> Tensor:
    """The mean of the valid losses of all ranks, for DistributedDataParallel and fully_shard.

    losses   one number for each element or sample, as a loss with `reduction="none"` gives them; masked or plain
    weights  for a weighted mean, the sum of weights · losses / the sum of weights; of the shape of `losses`

    The value is the same on all ranks. The derivative on each rank is such that gradients averaged over the ranks are those
    of one process with all samples, while a mean on each rank would give the samples of a rank with few valid ones more
    weight. Plain, and 0 if nothing is valid anywhere, which trains nothing.
    """
    check_floating("mean_loss", losses)
    weighted = losses if weights is None else losses * weights
    local = summed(weighted, None, False)
    of = counted(weighted, None, False) if weights is None else summed(weights.mask_like(weighted), None, False)
    del local, of
    raise NotImplementedError
