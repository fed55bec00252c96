"""Making masked tensors: from data and mask, from NaN, from lengths. All checking of what callers give happens here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from masked_dispatch.interception import constant_in_graphs, guard_on, recording, under_transform, while_compiling
from masked_dispatch.mask_bytes import teach_inductor
from masked_dispatch.storage.interchange import from_torch_sparse
from masked_dispatch.tensor import BOOK, MaskedTensor
from masked_dispatch.validity import Family
from op_registry import MaskedSemanticsError, registry
from op_registry.patterns import OF_TORCH
from op_registry.records import being_traced


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


def check_places(tensor: Tensor, other: Tensor) -> None:
    """Refuse an `other` of mask_like that has no places to give, or none that fit."""
    if not isinstance(other, MaskedTensor):
        raise TypeError(
            f"mask_like takes its places from a masked tensor, not from a {type(other).__name__}; to give a mask "
            "itself use x.mask_with(mask), or as_masked_tensor(data, mask)"
        )
    if not broadcasts_to(other.shape, tensor.shape):
        raise ValueError(
            f"`other` has shape {tuple(other.shape)}, which does not broadcast to the tensor's shape "
            f"{tuple(tensor.shape)}"
        )


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
    return BOOK + registry.version


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


def check_mask(data: Tensor, mask: Any) -> Tensor:
    """`mask` as a bool or int8 tensor that fits `data`, or an error that says why it does not."""
    if isinstance(mask, MaskedTensor):
        raise TypeError("the mask is itself a masked tensor; use x.mask_like(other), or pass other.get_mask()")
    if not isinstance(mask, Tensor):
        mask = torch.as_tensor(mask, device=data.device)
    if mask.requires_grad:
        raise ValueError(
            f"the mask (shape {tuple(mask.shape)}) requires grad; a mask has no gradient, pass mask.detach()"
        )
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(
            f"the mask has dtype {mask.dtype}; it has to be bool (True = valid), or integers that are all 0 or 1. "
            "Compare it: mask > 0.5"
        )
    if mask.device != data.device:
        raise RuntimeError(
            f"data is on {data.device} and the mask on {mask.device}; move one of them: mask.to({str(data.device)!r})"
        )
    if not broadcasts_to(mask.shape, data.shape):
        raise ValueError(
            f"the mask has shape {tuple(mask.shape)}, which does not broadcast to the data's shape {tuple(data.shape)}"
        )
    if mask.layout is not torch.strided:
        raise TypeError(f"the mask has layout {mask.layout}; pass mask.to_dense()")
    if mask.dtype is torch.bool:
        return mask
    if not _values_unknown(mask) and mask.numel() and not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(
            f"the mask has dtype {mask.dtype} and values between {mask.min().item()} and {mask.max().item()}; "
            f"integers in a mask have to "
            "be 0 (invalid) or 1 (valid). Compare it: mask != 0"
        )
    return mask if mask.dtype is torch.int8 else mask.to(torch.int8)


def broadcasts_to(shape: torch.Size, wanted: torch.Size) -> bool:
    """Whether a tensor of `shape` can be expanded to `wanted`."""
    if len(shape) > len(wanted):
        return False
    return all(n in (1, w) for n, w in zip(reversed(shape), reversed(wanted), strict=False))


def _values_unknown(tensor: Tensor) -> bool:
    return (
        torch.compiler.is_compiling()
        or being_traced(tensor)
        or under_transform()
        or recording()
        or tensor.device.type == "meta"
    )


def stored_validity(data: Tensor, mask: Tensor) -> tuple[Tensor, bool]:
    """A checked mask as validity of `data`, and whether its memory is the caller's."""
    missing = data.ndim - mask.ndim
    if missing:
        mask = mask[(None,) * missing]
    if being_traced(mask) or under_transform():
        if mask.dtype is torch.bool and mask.device.type == "cpu" and not under_transform():
            teach_inductor()
            return torch.ops.masked_dispatch.bytes_of(mask), False
        return mask.to(torch.int8), False
    if recording():
        return mask.to(torch.int8, copy=True), False
    shareable = mask.shape == data.shape and mask.stride() == data.stride() and data.ndim > 0
    if mask.dtype is torch.bool:
        if mask.stride(-1) != 1 if mask.ndim else False:
            return mask.to(torch.int8), False
        as_bytes = mask.view(torch.int8)
        if mask.device.type != "meta" and bool(((as_bytes != 0) & (as_bytes != 1)).any()):
            return mask.to(torch.int8), False
        return (as_bytes, True) if shareable else (as_bytes.clone(), False)
    return (mask, True) if shareable else (mask.clone(), False)


def mark_as_external(tensor: MaskedTensor) -> None:
    """Note that the tensor's validity is memory of the caller's."""
    Family(tensor, external=True)
