"""Making masked tensors: from data and mask, from NaN, from lengths. All checking of what callers give happens here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from masked_dispatch.interop.torch_sparse import from_torch_sparse
from masked_dispatch.tensor.checks import _values_unknown, check_mask
from masked_dispatch.tensor.masked_tensor import CODE_VERSION, MaskedTensor
from masked_dispatch.torch_internals import constant_in_graphs, guard_on, while_compiling
from op_registry import MaskedSemanticsError, registry
from op_registry.sparse.pattern import OF_TORCH


def is_masked_tensor(value: Any) -> bool:
    """Whether `value` is a masked tensor."""
    return isinstance(value, MaskedTensor)


def masked_tensor(data: Any, mask: Any = None, *, requires_grad: bool = False) -> MaskedTensor:
    """A new masked tensor from copies of data and mask, a leaf, as torch.tensor makes one.

    data  a plain tensor of any shape and dtype (or what torch.as_tensor takes). One of torch's sparse tensors, of any
          layout, is stored as it is: what it specifies is valid, and `mask` takes from that
    mask  bool, or integers 0 and 1, True where valid; of data's shape or broadcastable to it; None: all valid

    Raises TypeError (dtype), ValueError (shape, values), RuntimeError (device) for a mask that does not fit, and
    RuntimeError, as torch.tensor does, where data of this dtype cannot require grad.
    """
    data = as_data(data, sparse=True)
    if mask is not None:
        mask = check_mask(data, mask)
    if data.layout is not torch.strided:
        data = from_torch_sparse(data.detach().clone())
        data = data if mask is None else torch.ops.masked_dispatch.mask_with(data, mask)
        return data.requires_grad_(_checked(data, requires_grad))
    copy = torch.ops.masked_dispatch.masked_tensor(data.detach(), mask, book())
    return copy.requires_grad_(_checked(copy, requires_grad))


def _checked(tensor: Tensor, requires_grad: bool) -> bool:
    if requires_grad and not (tensor.is_floating_point() or tensor.is_complex()):
        raise RuntimeError(
            f"Only Tensors of floating point and complex dtype can require gradients; the data is {tensor.dtype}"
        )
    return requires_grad


def as_masked_tensor(data: Any, mask: Any = None) -> MaskedTensor:
    """A masked tensor that shares memory with `data`; differentiable with respect to it.

    The mask's memory is shared where it is bool or int8 of data's shape and strides; otherwise it is copied. Data that
    is already masked keeps its mask, intersected with `mask`. One of torch's sparse tensors, of any layout, is stored
    as it is: what it specifies is valid; elements that it lists twice are accumulated. Its gradient is sparse.

    Raises as :func:`masked_tensor` does, and ValueError for a sparse tensor whose indices are not well formed.
    """
    data = as_data(data, sparse=True)
    if mask is not None:
        mask = check_mask(data, mask)
    if data.layout is not torch.strided:
        data = from_torch_sparse(data)
    if isinstance(data, MaskedTensor):
        return data if mask is None else torch.ops.masked_dispatch.mask_with(data, mask)
    return torch.ops.masked_dispatch.as_masked_tensor(data, mask, book())


def mask_like(tensor: Tensor, other: MaskedTensor) -> MaskedTensor:
    """What a tensor has in the places of another: its values, valid where it is and `other` is; differentiable.

    tensor  plain (valid everywhere) or masked, of any dtype
    other   masked, of a shape that broadcasts to `tensor`'s

    Stored like `other`, if that is stored sparsely and has the same shape; then nothing of the tensor's size is made.
    Otherwise the values are shared with `tensor`, as `mask_with` shares them.

    Raises TypeError where `other` is not masked, ValueError for shapes that do not fit.
    """
    result: MaskedTensor = torch.ops.masked_dispatch.mask_like(tensor, other)
    return result


def from_nan(data: Tensor) -> MaskedTensor:
    """`data` (floating point or complex), invalid where it is NaN; differentiable."""
    data = as_data(data)
    if not (data.is_floating_point() or data.is_complex()):
        raise TypeError(f"from_nan needs floating point or complex data, which can hold NaN; got {data.dtype}")
    return as_masked_tensor(data, ~torch.isnan(data))


def from_lengths(data: Tensor, lengths: Tensor, dim: int = 1) -> MaskedTensor:
    """A padded batch, valid in the first `lengths[i]` places of `dim` in row i.

    data     shape (B, …, T, …) with T at `dim`
    lengths  integers, shape (B,), each between 0 and T
    """
    data = as_data(data)
    lengths = torch.as_tensor(lengths, device=data.device)
    dim = dim % data.ndim
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype is torch.bool:
        raise TypeError(f"lengths are integers, one for each row; got {lengths.dtype}")
    if dim == 0 or lengths.shape != data.shape[:1]:
        raise ValueError(
            f"lengths of shape {tuple(lengths.shape)} do not fit data of shape {tuple(data.shape)}: one length for "
            f"each index of "
            f"dimension 0, counted along dim={dim}"
        )
    if (
        not _values_unknown(lengths)
        and lengths.numel()
        and (int(lengths.min()) < 0 or int(lengths.max()) > data.shape[dim])
    ):
        raise ValueError(
            f"lengths run from {int(lengths.min())} to {int(lengths.max())}, but dimension {dim} has "
            f"{data.shape[dim]} places"
        )
    places = torch.arange(data.shape[dim], device=data.device).view(-1, *[1] * (data.ndim - dim - 1))
    return as_masked_tensor(data, places < lengths.view(-1, *[1] * (data.ndim - 1)))


def book() -> str:
    """The state of this library and of the rules in force, for graphs to be told apart by; guarded on in each."""
    if torch.compiler.is_dynamo_compiling():
        while_compiling(_guard_on_code_version)
    return _code_version()


def _guard_on_code_version(context: Any) -> None:
    guard_on(_code_version, context)


@constant_in_graphs
def _code_version() -> str:
    return CODE_VERSION + registry.version


def as_data(data: Any, sparse: bool = False) -> Tensor:
    """What may be masked: a strided tensor, or what torch.as_tensor makes one of; a sparse one too if `sparse`."""
    if not isinstance(data, Tensor):
        data = torch.as_tensor(data)
    if data.layout in OF_TORCH and not sparse:
        raise MaskedSemanticsError(
            f"data of layout {data.layout} and shape {tuple(data.shape)} is taken by masked_tensor and "
            "as_masked_tensor only, for which its specified elements are the valid ones; elsewhere pass "
            "data.to_dense()"
        )
    if data.is_nested:
        raise MaskedSemanticsError(
            f"a nested tensor of layout {data.layout} cannot be masked: pass its padded form with the lengths of its "
            "sequences, from_lengths(data.to_padded_tensor(0), lengths), and .to_packed() to store what is there alone"
        )
    if data.layout is not torch.strided and data.layout not in OF_TORCH:
        raise MaskedSemanticsError(
            f"data of layout {data.layout} and shape {tuple(data.shape)} cannot be masked; pass data.to_dense()"
        )
    if data.is_quantized:
        raise MaskedSemanticsError(
            f"quantized data ({data.dtype}, shape {tuple(data.shape)}) cannot be masked; pass data.dequantize()"
        )
    return data
