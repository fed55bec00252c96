"""Losses that torch writes in Python and that divide by a size.

Law: the size is the number of what is valid. One operator in the function's body gets a rule that makes up for the
division that follows it; where no mask is stored its factor is exactly 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from op_registry.authoring import COMPOSITE, accumulation_dtype, inside
from op_registry.ops.losses.rules import SUM

aten = torch.ops.aten


@inside(torch.nn.functional.kl_div, aten.kl_div.default, category=COMPOSITE, when={"reduction": "batchmean"})
def kl_div(self: Tensor, target: Tensor, reduction: int, *, log_target: bool = False) -> Tensor:
    """The sum, times rows / (rows that have a valid element): torch divides it by the number of rows."""
    total = aten.kl_div.default(self, target, reduction, log_target=log_target)
    if reduction != SUM or self.dim() == 0:
        return total
    ones = torch.ones_like(self + target, dtype=accumulation_dtype(total.dtype))
    batch = ones.dim() - self.dim()
    others = [dim for dim in range(ones.dim()) if dim != batch or ones.shape[dim] != self.shape[0]]
    rows = (ones.amax(others) if others and ones.numel() else ones).sum()
    return (total * (self.shape[0] / rows)).to(total.dtype)


@inside(torch.nn.functional.multilabel_soft_margin_loss, aten.sum.dim_IntList, category=COMPOSITE)
def multilabel_soft_margin_loss(
    self: Tensor, dim: Sequence[int], keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """The sum over classes, times classes / (valid classes): torch divides it by the number of classes."""
    total = aten.sum.dim_IntList(self, dim, keepdim, dtype=dtype)
    if self.dim() == 0:
        return total
    ones = torch.ones_like(self, dtype=accumulation_dtype(total.dtype))
    classes = aten.sum.dim_IntList(ones, dim, keepdim)
    return (total * (self.shape[-1] / classes)).to(total.dtype)
