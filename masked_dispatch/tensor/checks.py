"""Checks of data and masks passed by callers, and conversion of masks to stored validity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.traced import teach_inductor
from masked_dispatch.torch_internals import is_value_of_graph, recording, under_transform
from op_registry.dimensions.sizes import known_to_hold
from op_registry.records.arguments import with_leading_dims
from op_registry.records.tracing import being_traced


def is_given_masked(*args: object, **kwargs: object) -> bool:
    """Return whether one of the arguments is a masked tensor; :func:`contains_masked` looks into containers too."""
    return any(isinstance(argument, MaskedTensor) for argument in (*args, *kwargs.values()))


def contains_masked(value: object) -> bool:
    """Return whether a value is a masked tensor, or a list, tuple or dict that contains one."""
    if isinstance(value, dict):
        return any(map(contains_masked, value.values()))
    return isinstance(value, MaskedTensor) or (isinstance(value, (list, tuple)) and any(map(contains_masked, value)))


def check_mask_source(tensor: Tensor, other: Tensor) -> None:
    """Refuse an `other` of mask_like that has no mask, or whose mask does not broadcast."""
    if not isinstance(other, MaskedTensor):
        raise TypeError(
            f"mask_like takes its mask from a masked tensor, not from a {type(other).__name__}; to pass a mask itself "
            "use x.mask_with(mask), or as_masked_tensor(data, mask)"
        )
    if not broadcasts_to(other.shape, tensor.shape):
        raise ValueError(
            f"`other` has shape {tuple(other.shape)}, which does not broadcast to the tensor's shape "
            f"{tuple(tensor.shape)}"
        )


def as_plain_tensor(data: Any, **options: Any) -> Tensor:
    """torch.as_tensor, but an array that is not writable (such as pandas gives) is copied: torch would warn of it."""
    is_writable = getattr(getattr(data, "flags", None), "writeable", True)
    return torch.as_tensor(data if is_writable else data.copy(), **options)


def check_mask(data: Tensor, mask: object) -> Tensor:
    """`mask` as a bool or int8 tensor that fits `data`; raises if it does not fit."""
    if isinstance(mask, MaskedTensor):
        raise TypeError(
            f"the mask is itself a masked tensor of shape {tuple(mask.shape)}, whose invalid entries are neither True "
            "nor False. Say which they are: x.mask_with((x < 2).to_tensor(False)). To take over the mask of another "
            "tensor use x.mask_like(other), or pass other.get_mask()"
        )
    if not isinstance(mask, Tensor):
        if hasattr(mask, "get_fill_value"):
            raise TypeError("the mask is itself a masked array of NumPy; pass mask.filled(False)")
        mask = as_plain_tensor(mask, device=data.device)
        if not mask.numel():  # an empty list has no dtype
            mask = mask.to(torch.bool)
    swapped = ""
    if data.dtype is torch.bool and mask.dtype is not torch.bool:
        swapped = " Are the two arguments exchanged? The data comes first: masked_tensor(data, mask)."
    if mask.requires_grad:
        raise ValueError(
            f"the mask (shape {tuple(mask.shape)}) requires grad; a mask has no gradient, pass mask.detach()"
        )
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(
            f"the mask has dtype {mask.dtype}; it has to be bool (True = valid), or integers 0 and 1. "
            f"Compare it: mask > 0.5.{swapped}"
        )
    if mask.device != data.device:
        raise RuntimeError(
            f"data is on {data.device} and the mask on {mask.device}; move one of them: mask.to({str(data.device)!r})"
        )
    if not broadcasts_to(mask.shape, data.shape):
        raise ValueError(
            f"the mask has shape {tuple(mask.shape)}, which does not broadcast to the data's shape "
            f"{tuple(data.shape)}{_dimension_to_add(mask.shape, data.shape)}{_one_for_each_stored(data, mask)}"
        )
    if mask.layout is not torch.strided:
        raise TypeError(f"the mask has layout {mask.layout}; pass mask.to_dense()")
    if mask.dtype is torch.bool:
        return mask
    if not values_unknown(mask) and mask.numel():
        # torch finds no extrema of wide unsigned integers.
        wide = mask if mask.dtype in (torch.int8, torch.uint8) else mask.to(torch.int64)
        least, most = (int(bound) for bound in wide.aminmax())
        if least < 0 or most > 1:
            raise ValueError(
                f"the mask has dtype {mask.dtype} and values between {least} and {most}; "
                f"integers in a mask have to be 0 (invalid) or 1 (valid). Compare it: mask != 0.{swapped}"
            )
    return mask if mask.dtype is torch.int8 else mask.to(torch.int8)


def _one_for_each_stored(data: Tensor, mask: Tensor) -> str:
    """The end of a message: how to select stored elements with one flag for each."""
    if getattr(data, "storage_layout", torch.strided) is torch.strided or mask.shape != (data.nnz,):  # type: ignore[attr-defined]
        return ""
    return (
        ". It has one flag for each stored element, which choose among the triplets that the tensor is made from: with "
        "coo = x.to_sparse(), as_masked_tensor(torch.sparse_coo_tensor(coo.indices()[:, flags], coo.values()[flags], "
        "x.shape))"
    )


def _dimension_to_add(mask: torch.Size, data: torch.Size) -> str:
    """The end of a message: where to add a dimension of size 1 so that the mask broadcasts, if only one place fits."""
    at = [dim for dim in range(len(mask) + 1) if broadcasts_to(torch.Size((*mask[:dim], 1, *mask[dim:])), data)]
    return f": pass mask.unsqueeze({at[0]})" if len(at) == 1 else ""


def least_and_most(integers: Tensor) -> tuple[int, int]:
    """The extremes of an integer tensor, read at once; also serves dtypes for which torch has no aminmax."""
    if integers.dtype in (torch.uint16, torch.uint32, torch.uint64):
        numbers = integers.flatten().tolist()
        return min(numbers), max(numbers)
    least, most = torch.stack((integers.min(), integers.max())).tolist()
    return least, most


def broadcasts_to(shape: torch.Size, wanted: torch.Size) -> bool:
    """Whether a tensor of `shape` can be expanded to `wanted`."""
    if len(shape) > len(wanted):
        return False
    for n, w in zip(reversed(shape), reversed(wanted), strict=False):
        # Compare for equality first: a graph does not know whether a data-dependent size is 1.
        if not (n is w or known_to_hold(n == w) or n == 1):
            return False
    return True


def checked_dim(caller: str, x: Tensor, dim: int) -> int:
    """A dimension of `x`, counted from the first; as torch, TypeError for what is no int, IndexError out of range."""
    if isinstance(dim, bool) or not hasattr(dim, "__index__"):
        raise TypeError(f"{caller} takes a dimension as an int, not {dim!r}")
    rank = max(x.ndim, 1)  # torch gives a number a dimension
    if not -rank <= dim < rank:
        raise IndexError(f"{caller}: dim={dim} is out of range for a tensor of shape {tuple(x.shape)}")
    return dim % rank


def checked_dims(caller: str, x: Tensor, dim: int | Sequence[int]) -> list[int]:
    """The same of one dimension or several."""
    dims: Any = dim if isinstance(dim, (tuple, list)) else [dim]
    return [checked_dim(caller, x, d) for d in dims]


def values_unknown(tensor: Tensor) -> bool:
    """Whether we cannot read the values of `tensor`: it is traced, inside a transform, or on meta."""
    return (
        torch.compiler.is_compiling()
        or being_traced(tensor)
        or under_transform()
        or recording()
        or tensor.device.type == "meta"
    )


def stored_validity(data: Tensor, mask: Tensor) -> Tensor:
    """A checked mask as the validity of `data`, in new memory, to which nobody else writes."""
    missing_dims = data.ndim - mask.ndim
    if missing_dims:
        mask = with_leading_dims(mask, missing_dims)
    # Exported programs may hold only torch's own operators.
    in_graph = is_value_of_graph(mask) and not torch.compiler.is_exporting()
    if in_graph and mask.dtype is torch.bool and mask.device.type == "cpu" and not under_transform():
        teach_inductor()
        return torch.ops.masked_dispatch.bytes_of(mask)
    # The conversion turns every nonzero byte of a bool mask into 1.
    return mask.to(torch.int8, copy=True)


def refuse_meta(op: OpOverload, target: Tensor, args: Sequence[Any]) -> None:
    """Refuse operands without values, whose results would overwrite the target with arbitrary values."""
    for operand in args:
        if isinstance(operand, (list, tuple)):
            refuse_meta(op, target, operand)
        elif isinstance(operand, Tensor) and operand.device.type == "meta":
            raise RuntimeError(
                f"{op}: an operand of shape {tuple(operand.shape)} is on meta and has no values to write to a masked "
                f"tensor of shape {tuple(target.shape)} on {target.device}. Move it there first: index.to(device)."
            )
