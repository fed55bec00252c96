"""Padded batches: which positions are there, the ends of samples, and their layout."""

from __future__ import annotations

import torch
from torch import Tensor

from masked_dispatch.tensor.checks import values_unknown
from masked_dispatch.tensor.masked_tensor import MaskedTensor


def padded(x: Tensor, extent: Tensor | None = None, *, dim: int | tuple[int, ...] | None = None) -> MaskedTensor:
    """The tensor with an extent: which of its positions are there. What is not there is padding, not missing.

    A batch with an extent gives, for each sample, what the sample gives by itself: see *Padding* in docs/semantics.md.

    x       masked, or plain (then every position of its extent is valid); its first dimension numbers samples
    extent  bool, of the tensor's shape or broadcastable to it, True where a position is there; None: the mask
    dim     the dimensions that number positions; None: all but the first along which the extent varies

    Memory is shared with `x`; differentiable. Raises TypeError (dtype), ValueError (shape, device, dimensions, or a
    valid element where nothing is there).
    """
    if extent is not None:
        _check_extent(x, extent)
    elif not isinstance(x, MaskedTensor):
        raise TypeError(
            f"padded takes a masked tensor, or a plain one with its extent: padded(x, extent). This one of shape "
            f"{tuple(x.shape)} is plain, and all of it would be there"
        )
    if x.ndim < 2:
        raise ValueError(f"padded takes a batch, (B, …, T, …), not a tensor of shape {tuple(x.shape)}")
    dims = None if dim is None else sorted({d % x.ndim for d in ([dim] if isinstance(dim, int) else dim)})
    if dims is not None and 0 in dims:
        raise ValueError("padded: dimension 0 numbers samples; positions are numbered by others")
    result: MaskedTensor = torch.ops.masked_dispatch.padded(x, extent, dims)
    return result


def _check_extent(x: Tensor, extent: Tensor) -> None:
    if not isinstance(extent, Tensor) or isinstance(extent, MaskedTensor) or extent.dtype is not torch.bool:
        raise TypeError(f"extent has to be a plain bool tensor, True where a position is there; got {_kind(extent)}")
    if extent.device != x.device:
        raise ValueError(f"extent is on {extent.device}, the tensor on {x.device}: extent.to(x.device)")
    if extent.ndim > x.ndim or any(
        e not in (1, s) for e, s in zip(reversed(extent.shape), reversed(x.shape), strict=False)
    ):
        raise ValueError(f"extent of shape {tuple(extent.shape)} does not broadcast to {tuple(x.shape)}")
    if isinstance(x, MaskedTensor) and not values_unknown(extent):
        beyond = int((x.get_mask() & ~extent).sum())
        if beyond:
            raise ValueError(
                f"{beyond} elements of the tensor of shape {tuple(x.shape)} are valid where the extent says that "
                "nothing is there. An extent contains the mask: pass x.mask_with(extent), or extent | mask"
            )


def _kind(value: object) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
