"""Statistics over the valid elements of all ranks, a loss that weights ranks by their count,
and gradients sent as sparse masked tensors.
"""

# Python evaluates the annotations of this module, because DistributedDataParallel checks those of a hook.
import math
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import GradBucket, ProcessGroup  # type: ignore[attr-defined]

from masked_dispatch.api.construct import as_masked_tensor, mask_like
from masked_dispatch.api.sparsify import sparse_topk
from masked_dispatch.distributed.agreement import Description, agree_that_all_are_alike, described
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry import MaskedSemanticsError
from op_registry.records.arguments import accumulation_dtype
from op_registry.records.fill import OwnFunction

Dims = int | tuple[int, ...] | None


def count(x: Tensor, dim: Dims = None, keepdim: bool = False, *, group: ProcessGroup | None = None) -> Tensor:
    """Count the valid elements of all ranks; the result is a plain int64 tensor.

    dim  the dimensions to count over, all by default; the ranks' tensors may differ in these
    """
    return over_ranks("count", group, counted(x, dim, keepdim), problem=problem_of(x, dim))[0]


def sum(x: Tensor, dim: Dims = None, keepdim: bool = False, *, group: ProcessGroup | None = None) -> MaskedTensor:
    """Sum the valid elements of all ranks; the result is invalid where no rank has one; differentiable.

    dim  the dimensions to sum over, all by default; the ranks' tensors may differ in these

    The sum accumulates half precision in float32 and rounds once; it accumulates integers and bool in int64.
    """
    local = summed(x, dim, keepdim), counted(x, dim, keepdim)
    total, n = over_ranks("sum", group, *local, problem=problem_of(x, dim))
    return where_any(total.to(x.dtype) if x.dtype.is_floating_point or x.is_complex() else total, n)


def mean(x: Tensor, dim: Dims = None, keepdim: bool = False, *, group: ProcessGroup | None = None) -> MaskedTensor:
    """Average the valid elements of all ranks; the result is invalid where no rank has one; differentiable.

    dim  the dimensions to average over, all by default; the ranks' tensors may differ in these
    """
    check_floating("mean", x)
    local = summed(x, dim, keepdim), counted(x, dim, keepdim)
    total, n = over_ranks("mean", group, *local, problem=problem_of(x, dim))
    return where_any((total / n.clamp(min=1)).to(x.dtype), n)


def var(
    x: Tensor, dim: Dims = None, keepdim: bool = False, *, correction: int = 1, group: ProcessGroup | None = None
) -> MaskedTensor:
    """Compute the variance over the valid elements of all ranks, invalid where no rank has one; differentiable.

    dim         the dimensions to compute it over, all by default; the ranks' tensors may differ in these
    correction  subtracted from the number of elements; the variance of one element is NaN, as in torch
    """
    check_floating("var", x)
    wide = x.to(accumulation_dtype(x.dtype))
    local = summed(wide, dim, True), counted(x, dim, True)
    total, n = over_ranks("var", group, *local, problem=problem_of(x, dim))
    differences = wide - total / n.clamp(min=1)
    (squares,) = over_ranks("var", group, summed(differences * differences, dim, keepdim))
    n = n.view(squares.shape)
    return where_any((squares / (n - correction).clamp(min=0)).to(x.dtype), n)


def mean_loss(losses: Tensor, weights: Tensor | None = None, *, group: ProcessGroup | None = None) -> MaskedTensor:
    """Average the valid losses of all ranks: data-parallel training calls `backward()` on the result.

    losses   a number for each element or sample, from a loss function with `reduction="none"`; masked or plain
    weights  weights of the losses' shape, for a weighted mean: the sum of weights · losses over the sum of weights

    All ranks get the value that one process would compute from all samples; it is invalid if no rank has a valid loss.
    DistributedDataParallel and fully_shard average the ranks' gradients, which gives the gradient of that one process.
    (If each rank took its own mean, the samples of a rank with few would count more.) All ranks must call backward; a
    rank without a valid loss contributes zeros.
    """
    check_floating("mean_loss", losses)
    weighted = losses if weights is None else losses * weights
    local = summed(weighted, None, False)
    with torch.no_grad():
        total, n = over_ranks("mean_loss", group, local, counted(weighted, None, False))
    if weights is None:
        divisor = n.clamp(min=1)
    else:
        counting = mask_like(weights, weighted) if isinstance(weighted, MaskedTensor) else weights
        (divisor,) = over_ranks("mean_loss", group, summed(counting, None, False))
    replicated = Replicated.apply(local, total, distributed.get_world_size(group))
    return where_any((replicated / divisor).to(losses.dtype), n)


# ------------------------------------------------------------------------------------------------------ on one rank


def dims_of(x: Tensor, dim: Dims) -> list[int]:
    return list(range(x.ndim)) if dim is None else [dim] if isinstance(dim, int) else list(dim)


def summed(x: Tensor, dim: Dims, keepdim: bool) -> Tensor:
    """Return the plain sum of this rank's valid elements, 0 where it has none, in the accumulation dtype."""
    dtype = accumulation_dtype(x.dtype) if x.dtype.is_floating_point or x.is_complex() else torch.int64
    total = x.sum(dims_of(x, dim), keepdim, dtype=dtype)
    return total.to_tensor(0) if isinstance(total, MaskedTensor) else total


def problem_of(x: Tensor, dim: Dims) -> str | None:
    """Say why the results would have positions, of which each rank knows its own; None if they have none."""
    extent = x._extent if isinstance(x, MaskedTensor) else None
    gone = {d % x.ndim for d in dims_of(x, dim)} if x.ndim else set()
    factors = () if extent is None else extent.factors
    if not any(set(f.positions or f.depends) - gone for f in factors):
        return None
    return (
        f"a result over dim={dim} of a tensor of shape {tuple(x.shape)} keeps dimensions of which each rank knows "
        "which positions are there, and the ranks' samples differ. Reduce these dimensions too; or pass "
        "x.without_extent(), in which padding counts as missing"
    )


def counted(x: Tensor, dim: Dims, keepdim: bool) -> Tensor:
    """Count this rank's valid elements."""
    return as_masked_tensor(x).count(tuple(dims_of(x, dim)), keepdim)


def check_floating(name: str, x: Tensor) -> None:
    if not x.dtype.is_floating_point and not x.is_complex():
        raise TypeError(f"masked_dispatch.distributed.{name} of {x.dtype}: convert first, x.to(torch.float32)")


def where_any(value: Tensor, n: Tensor) -> MaskedTensor:
    return as_masked_tensor(value, n > 0)


# ---------------------------------------------------------------------------------------------------- between ranks


def over_ranks(name: str, group: ProcessGroup | None, *local: Tensor, problem: str | None = None) -> tuple[Tensor, ...]:
    """Return the sums over the ranks, after the ranks agree on dtypes and shapes."""
    group = distributed.group.WORLD if group is None else group
    if group is None:
        raise ValueError(
            f"masked_dispatch.distributed.{name} needs a process group: call torch.distributed.init_process_group, or "
            "pass group="
        )
    call = f"masked_dispatch.distributed.{name}"
    mine = Description(call, tuple(described(t) for t in local), problem=problem)
    agree_that_all_are_alike(group, mine, local[0].device)
    if problem is not None:  # of all ranks
        raise MaskedSemanticsError(f"{call}: {problem}")
    return tuple(SumOverRanks.apply(t, group) for t in local)


class SumOverRanks(OwnFunction):
    """Sum the ranks' plain tensors, on all ranks; backward sums the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        total = local.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return SumOverRanks.apply(grad, ctx.group), None


class Replicated(OwnFunction):
    """A total that all ranks hold and use in the same way, so its backward needs no message."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, total: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return total.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.ranks, None, None


# ---------------------------------------------------------------------- only the largest gradients, with error feedback


class TopK:
    """The state of `topk_hook`: the gradients that one rank has not sent yet.

    share  the share of each bucket's elements that the rank sends, between 0 and 1
    group  the process group, by default torch's default group

    `state.sent` counts the gradient elements that this rank has sent, `state.elements` all that it has computed.
    """

    def __init__(self, share: float, group: ProcessGroup | None = None) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share has to be between 0 and 1, the part of the gradients to send; got {share}")
        self.share = share
        self.group = group
        self.sent = 0
        self.elements = 0
        # The key is the parameter, because DistributedDataParallel rebuilds its buckets after the first step.
        self._unsent: dict[Tensor, Tensor] = {}

    def largest(self, bucket: GradBucket) -> MaskedTensor:
        """Return the largest elements of the bucket plus its unsent remainder, shape (elements of the bucket,)."""
        whole, parameters, gradients = bucket.buffer(), bucket.parameters(), bucket.gradients()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter in self._unsent:
                gradient += self._unsent[parameter]
        sent = mask_like(whole, sparse_topk(whole.abs(), math.ceil(self.share * len(whole))))
        self.sent += sent.nnz
        self.elements += len(whole)
        whole.copy_(torch.zeros_like(sent))  # a masked update: writes 0 where the rank sends the element
        for parameter, gradient in zip(parameters, gradients, strict=True):
            self._unsent[parameter] = gradient.clone()
        return sent


def topk_hook(state: TopK, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Compress gradients in DistributedDataParallel: ``model.register_comm_hook(TopK(0.01), topk_hook)``.

    Each rank sends its gradients of largest magnitude; the average over ranks counts unsent elements as 0.
    """
    sent = state.largest(bucket)
    distributed.all_reduce(sent, group=state.group)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(sent.to_tensor(0) / distributed.get_world_size(state.group))
    return done
