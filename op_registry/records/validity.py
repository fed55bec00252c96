"""Validity tensors: int8 or bool, 1 = valid; None stands for "all valid"."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from op_registry.errors import MaskedSemanticsError
from op_registry.records.kept import once_in_graph
from op_registry.records.tracing import being_traced, computed_at_once


def as_bool(validity: Tensor) -> Tensor:
    """int8 or bool validity as bool: free in eager mode; in a compiled graph, widened before the comparison."""
    if validity.dtype is torch.bool:
        return validity
    if being_traced(validity):
        return once_in_graph(validity, "bool", lambda: validity.to(torch.int32) != 0)
    return validity.view(torch.bool)


def as_int8(valid: Tensor) -> Tensor:
    """bool or int8 validity as int8, the dtype in which records store it."""
    if valid.dtype is torch.int8:
        return valid
    if being_traced(valid):
        # Convert by way of int32: compilers narrow a comparison directly to bytes one element at a time.
        return valid.to(torch.int32).to(torch.int8)
    if not valid.is_contiguous():
        return valid.to(torch.int8)
    return valid.view(torch.int8)


@overload
def intersect(a: Tensor, b: Tensor | None) -> Tensor: ...
@overload
def intersect(a: Tensor | None, b: Tensor | None) -> Tensor | None: ...
def intersect(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Valid where both are valid; None means all valid. Intersecting a mask object with itself is free."""
    if a is None or a is b:
        return b
    if b is None or ((a._base is not None or b._base is not None) and is_same_memory(a, b)):  # (views of one mask)
        return a
    return as_int8(a) & as_int8(b)


def unite(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Valid where either is valid; None means all valid."""
    if a is None or b is None:
        return None
    return a if a is b else as_int8(a) | as_int8(b)


def on_device_of(data: Tensor, validity: Tensor | None) -> Tensor | None:
    """The validity on the device of the data."""
    if validity is None or validity.device == data.device:
        return validity
    if validity.device.type == "meta":
        raise MaskedSemanticsError(
            f"a mask of shape {tuple(validity.shape)} on meta has no values, so that it is unknown what would be valid "
            f"on {data.device}. Say so with masked_tensor(data, mask), where data is made from x.get_data(); "
            f"torch.empty_like(x, device=device) has nothing valid until it is written."
        )
    return validity.to(data.device)


def is_same_memory(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two masks are one, or show one memory alike, as those of halves of features do."""
    if a is b or a is None or b is None or type(a) is not Tensor or type(b) is not Tensor:
        return a is b
    if a.shape != b.shape or not computed_at_once(a, b):
        return False
    if a.stride() != b.stride() and any(
        s != t and n != 1 for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True)
    ):
        return False
    return a.data_ptr() == b.data_ptr() and a.device == b.device
