"""Losses that torch writes in Python: those that divide by a size, and one that asks where its targets lie.

Law: the size is the number of valid elements. One operator in the function's body gets a rule that makes up for the
division that follows it; where no mask is stored its factor is exactly 1.

Law of nn.AdaptiveLogSoftmaxWithLoss: the loss is the mean over the valid rows, those with a valid target and a valid
element of the input; the output of another row is invalid. With partly invalid targets a plain input is refused,
because the module makes its output from it: pass as_masked_tensor(input).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from op_registry.authoring import (
    COMPOSITE,
    QUERY,
    Dense,
    MaskedSemanticsError,
    Number,
    accumulation_dtype,
    inside,
)
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


# ---------------------------------------------------------------------------------------- nn.AdaptiveLogSoftmaxWithLoss


@inside(torch.nn.modules.adaptive, aten.index_fill_.int_Scalar, category=COMPOSITE)
def adaptive_index_fill_(self: Tensor, dim: int, index: Tensor, value: Number) -> Tensor:
    """An assignment: torch fills a buffer made of the target, which index_fill would leave unwritten, hence invalid."""
    return self.index_copy_(dim, index, torch.full(index.shape, value, dtype=self.dtype, device=self.device))


# torch asks of each cluster which targets lie in it, and raises if some lie in none. An invalid target counts as in the
# first one: there its row is written as it is, invalid, and is left out of the mean.


@inside(torch.nn.modules.adaptive, aten.ge.Scalar, category=QUERY)
def adaptive_target_at_least(self: Dense, other: Number) -> Tensor:
    """Whether each target is a class of this cluster or of a later one; plain."""
    return torch.ge(self.filled(0), other)


@inside(torch.nn.modules.adaptive, aten.lt.Scalar, category=QUERY)
def adaptive_target_below(self: Dense, other: Number) -> Tensor:
    """Whether each target is a class of this cluster or of an earlier one; plain."""
    return torch.lt(self.filled(0), other)


@inside(torch.nn.modules.adaptive, aten.gather.default, category=COMPOSITE)
def adaptive_gather(self: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    """Refused where the output of an invalid target would be written to a buffer of the input that has no mask."""
    if type(self) is Tensor and int(torch.count_nonzero(torch.ones_like(index))) < index.numel():
        raise MaskedSemanticsError(
            f"AdaptiveLogSoftmaxWithLoss makes its output in a buffer of the input, which is a plain tensor, and "
            f"{index.numel()} targets are not all valid. Pass the input as a masked tensor, as_masked_tensor(input): "
            "then the outputs of invalid targets are invalid, and left out of the loss."
        )
    return aten.gather.default(self, dim, index, sparse_grad=sparse_grad)
