"""Sums that torch has no word for: of the valid contributions, and with weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from masked_dispatch.api.construct import as_masked_tensor, mask_like
from masked_dispatch.interop.crossing import takes
from masked_dispatch.tensor.checks import as_plain_tensor, checked_dims
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry.records.arguments import accumulation_dtype


def accumulate(*tensors: Tensor) -> Tensor:
    """The sum of the valid contributions, valid where there is at least one; differentiable.

    tensors  one or more, masked or plain (a plain one contributes everywhere), of shapes that broadcast together

    Returns a masked tensor with the shape and dtype of their sum by torch.add (bool: "or"); a plain one if all are
    plain. Half-precision contributions are summed in float32 and rounded once.

    Raises TypeError for arguments that are not tensors, RuntimeError for shapes that do not broadcast.
    """
    if not tensors:
        raise TypeError("accumulate takes at least one tensor: the shape of an empty sum is not known")
    for position, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"accumulate takes tensors; argument {position} is {tensor!r}, a {type(tensor).__name__}. "
                "Unpack a list with accumulate(*tensors), and convert a number with torch.tensor(number)"
            )
    return torch.ops.masked_dispatch.accumulate(tensors)


# ------------------------------------------------------------------------- NumPy's average, which torch has no word for

Dims = int | Sequence[int] | None


@overload
def average(
    x: Tensor,
    weights: Tensor | Sequence[float] | None = None,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    returned: Literal[False] = False,
) -> Tensor: ...


@overload
def average(
    x: Tensor,
    weights: Tensor | Sequence[float] | None = None,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    returned: Literal[True],
) -> tuple[Tensor, Tensor]: ...


@takes(x=Tensor)
def average(
    x: Tensor,
    weights: Tensor | Sequence[float] | None = None,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    returned: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The weighted mean over `dim`, ``(x * weights).sum(dim) / weights.sum(dim)``, as numpy.ma.average.

    x         floating point or complex, any shape and storage, masked or plain
    weights   of the shape of `x`; or of its sizes along `dim`, in that order: one number for each index along one
              dimension. Masked or plain; an element counts if it and its weight are valid. None: equal weights
    dim       one dimension, several, or all of them
    returned  return the sums of the weights too, in the shape of the average

    The result has the dtype to which `x` and the weights promote; sums accumulate in the dtype in which torch.sum does.
    It is masked if `x` or the weights are, and invalid where no element counts; weights that sum to 0 give NaN or an
    infinity.

    Raises TypeError for integers and bool, and where the shapes differ and `dim` is not given; ValueError for weights
    that do not fit.
    """
    if not (x.is_floating_point() or x.is_complex()):
        raise TypeError(f"average needs floating point or complex values; got {x.dtype}. Convert them: x.double()")
    dims = None if dim is None else checked_dims("average", x, dim)
    weights = x.new_ones(()).expand(x.shape) if weights is None else _as_weights(weights, x, dim)
    dtype = torch.promote_types(x.dtype, weights.dtype)
    adding = accumulation_dtype(dtype)
    x, weights = x.to(adding), weights.to(adding)
    products = x * weights
    if isinstance(products, MaskedTensor):
        weights = mask_like(as_masked_tensor(weights), products)
    total = weights.sum(dims, keepdim)  # type: ignore[arg-type]
    result = (products.sum(dims, keepdim) / total).to(dtype)
    return (result, total.to(dtype)) if returned else result


def _as_weights(weights: Tensor | Sequence[float], x: Tensor, dim: Dims) -> Tensor:
    """The weights in the shape of `x`."""
    if not isinstance(weights, Tensor):
        weights = as_plain_tensor(weights, dtype=x.dtype, device=x.device)
    if weights.shape == x.shape:
        return weights
    shapes = f"weights of shape {tuple(weights.shape)} do not fit a tensor of shape {tuple(x.shape)}"
    if dim is None:
        raise TypeError(f"{shapes}: name the dimensions that they belong to, average(x, weights, dim)")
    dims = checked_dims("average", x, dim)
    if weights.shape != tuple(x.shape[d] for d in dims):
        raise ValueError(f"{shapes} and dim={dim}: weights need the tensor's shape, or its sizes along dim")
    sizes = [1] * x.ndim
    for d in dims:
        sizes[d] = x.shape[d]
    in_order = weights.permute(sorted(range(len(dims)), key=dims.__getitem__))
    return in_order.reshape(sizes).expand(x.shape)
