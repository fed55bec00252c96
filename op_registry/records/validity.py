"""Validity tensors: int8 or bool, 1 = valid; None stands for "all valid"."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from op_registry.errors import MaskedSemanticsError
from op_registry.records.dtypes import seen_as
from op_registry.records.kept import once_in_graph
from op_registry.records.tracing import being_traced, computed_at_once


def as_bool(validity: Tensor) -> Tensor:
    """int8 or bool validity as bool: free in eager mode; in a compiled graph, widened before the comparison."""
    if validity.dtype is torch.bool:
        return in_order(validity)
    if being_traced(validity):
        return once_in_graph(validity, "bool", lambda: in_order(validity).to(torch.int32) != 0)
    return seen_as(validity, torch.bool)


def as_int8(valid: Tensor) -> Tensor:
    """bool or int8 validity as int8, the dtype in which records store it."""
    if valid.dtype is torch.int8:
        return valid
    if being_traced(valid):
        # Convert by way of int32: compilers narrow a comparison directly to bytes one element at a time.
        return in_order(valid).to(torch.int32).to(torch.int8)
    if not valid.is_contiguous():
        return valid.to(torch.int8)
    return seen_as(valid, torch.int8)


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
    a, b = as_int8(a), as_int8(b)
    return a & b if type(a) is type(b) is Tensor else in_order(a) & in_order(b)


def may_be_refused(tensor: Tensor) -> bool:
    """Whether torch.export may refuse some sizes because torch asks how this tensor lies in memory.

    To order strides, torch asks of a transposed tensor whether 1 % n is 0 for a size n. Where it cannot tell for all n,
    torch.export refuses them.
    """
    exported = torch.compiler.is_exporting() and being_traced(tensor)
    return exported and any(type(stride) is not int for stride in tensor.stride())


def in_order(validity: Tensor) -> Tensor:
    """The validity; in a program of any sizes that torch.export traces, with the strides of a new tensor.

    (Of a mask of shape (B, n, 1), `contiguous` would keep the strides (n, 1, n).)
    """
    if not may_be_refused(validity) or dims_in_memory(validity) == list(range(validity.ndim)):
        return validity
    return once_in_graph(validity, "in order", lambda: validity.clone(memory_format=torch.contiguous_format))


def dims_in_memory(tensor: Tensor) -> list[int] | None:
    """The dimensions of a traced tensor without gaps, from the outermost in memory to the innermost.

    None if its strides have gaps or overlap, or if this depends on a size, of which we ask nothing.
    """
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    dims: list[int] = []
    stride: int = 1
    left = list(range(tensor.ndim))
    while left:
        inner = next((d for d in reversed(left) if statically_known_true(tensor.stride(d) == stride)), None)
        if inner is None:
            return None
        left.remove(inner)
        dims.insert(0, inner)
        stride *= tensor.shape[inner]
    return dims


def unite(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Valid where either is valid; None means all valid."""
    if a is None or b is None:
        return None
    return a if a is b else in_order(as_int8(a)) | in_order(as_int8(b))


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
