"""Validity tensors: int8 or bool, 1 = valid; None stands for "all valid". Values computed from one are kept with it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable
from typing import Any, overload

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from op_registry.errors import MaskedSemanticsError
from op_registry.records.arguments import seen_as
from op_registry.records.tracing import at_one_place_in_graph, being_traced, computed_at_once, under_transform


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
    may_be_one = b is not None and (type(a) is not Tensor or a._base is not None or b._base is not None)
    if b is None or (may_be_one and is_same_memory(a, b)):  # (views of one mask)
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
    if a is b or a is None or b is None:
        return a is b
    if type(a) is not Tensor or type(b) is not Tensor:
        return at_one_place_in_graph(a, b)
    if a.shape != b.shape or not computed_at_once(a, b):
        return False
    if a.stride() != b.stride() and any(
        s != t and n != 1 for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True)
    ):
        return False
    return a.data_ptr() == b.data_ptr() and a.device == b.device


# ------------------------------------------------------- values kept with a mask; a write to the mask empties the cache

# The limit exceeds the operators, dimensions and sizes that one mask meets in a model. But a mask of size 1 may meet
# any number of sizes, and lives as long as its parameter.
MOST_KEPT = 256

_ATTRIBUTE = "_masked_dispatch_kept"
_IN_GRAPH = "_kept_in_graph"
_graph_writes = 0


class Kept(dict[Any, Any]):
    """The cache of one mask: it holds at most MOST_KEPT entries, and drops the oldest first.

    Another thread may drop an entry at any time: read entries with `get`.
    """

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        while len(self) > MOST_KEPT:
            # Copy the keys in one step: another thread may add one meanwhile.
            self.pop(list(self)[0], None)  # noqa: RUF015


def kept_with(validity: Tensor) -> Kept:
    """The cache of this mask: empty if the mask has changed since the last call.

    A key begins with the name of the cached value, so that no two callers use one key. Callers must not cache while
    tracing, nor tensors computed in inference mode, which autograd cannot save; a mask made in inference mode has no
    version, and so no cache.
    """
    version: int = validity._version
    kept: tuple[int, Kept] | None = getattr(validity, _ATTRIBUTE, None)
    if kept is None or kept[0] != version:
        kept = (version, Kept())
        setattr(validity, _ATTRIBUTE, kept)
    return kept[1]


def once_in_graph(traced: Tensor, key: Hashable, compute: Callable[[], Any], holder: Any = None) -> Any:
    """What `compute` makes of a mask or an index, made once by a graph under construction until it writes to a mask.

    What a graph traces takes torch milliseconds, even if a compiler drops it as the same once more. A value made while
    nothing records has no place in a graph: each tracer makes its own.

    holder  what keeps the value; default: the tensor itself
    """
    if not being_traced(traced) or under_transform() or torch.is_inference_mode_enabled():
        return compute()
    holder, tracer = traced if holder is None else holder, get_proxy_mode()
    kept: _KeptInGraph | None = getattr(holder, _IN_GRAPH, None)
    if kept is None or kept.writes != _graph_writes or kept.tracer() is not tracer:
        kept = _KeptInGraph(tracer)
        setattr(holder, _IN_GRAPH, kept)
    try:
        found = kept.values.get(key)
    except TypeError:  # (a size of a graph has no hash)
        return compute()
    if found is None:
        found = kept.values[key] = compute()
    return found


def graph_writes_to_masks() -> None:
    """Forget what was made of masks: a graph under construction writes to one, and others may be views of it."""
    global _graph_writes
    _graph_writes += 1


def writes_of_graphs_to_masks() -> int:
    """How often graphs have written to masks: what is known of a mask holds until the next time."""
    return _graph_writes


class _KeptInGraph:
    """What a tracer has made of a mask since a number of writes."""

    __slots__ = ("tracer", "values", "writes")

    def __init__(self, tracer: Any) -> None:
        self.tracer = (lambda: None) if tracer is None else weakref.ref(tracer)
        self.values: dict[Hashable, Any] = {}
        self.writes = _graph_writes


def without_kept(tensor: Tensor) -> Tensor:
    """The tensor to write to a file: it shares the memory but not the cache, and each call returns the same object."""
    if not hasattr(tensor, _ATTRIBUTE):
        return tensor
    kept = kept_with(tensor)
    found: Tensor | None = kept.get(("alone",))
    if found is None:
        found = kept[("alone",)] = tensor.detach()
    return found


# ----------------------------------------------------------------------------------- counting, eight elements at a time

_LANES = 8
_MOST = 255
# Below this many elements torch's own sum costs less than these calls, on the devices where words are added faster.
_WORTH_IT = {"cpu": 1 << 16, "cuda": 1 << 24}


def count_ones(validity: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """The number of ones of an int8 mask over `dims`, exact: int32 or int64."""
    if not being_traced(validity) and validity.numel() >= _WORTH_IT.get(validity.device.type, math.inf):
        lanes = _by_lanes(validity, dims)
        if lanes is not None:
            kept = [1 if d in dims else n for d, n in enumerate(validity.shape) if keepdim or d not in dims]
            return lanes.reshape(kept)
    return validity.sum(dims, keepdim=keepdim, dtype=torch.int32)


def _by_lanes(validity: Tensor, dims: tuple[int, ...]) -> Tensor | None:
    """The counts, flat; None if the mask's memory or the dimensions do not allow words of eight bytes."""
    if not validity.is_contiguous() or validity.storage_offset() % _LANES:
        return None
    first = min(dims)
    count = math.prod(validity.shape[d] for d in dims)
    if set(dims) == set(range(first, validity.ndim)):
        if count % _LANES:
            return None
        words = validity.view(-1, count).view(torch.int64)
        return _sum_of_words(words, 1).view(torch.uint8).view(len(words), -1).sum(-1, dtype=torch.int32)
    if set(dims) == set(range(first, first + len(dims))):
        inner = math.prod(validity.shape[first + len(dims) :])
        if inner % _LANES:
            return None
        words = validity.view(-1, count, inner).view(torch.int64)
        return _sum_of_words(words, 1).view(torch.uint8).view(len(words), -1, inner).sum(1, dtype=torch.int32)
    return None


def _sum_of_words(words: Tensor, dim: int) -> Tensor:
    """Sums of at most 255 words each; a dimension that lists these sums replaces `dim`."""
    whole = words.shape[dim] // _MOST * _MOST
    parts = words.narrow(dim, 0, whole).unflatten(dim, (-1, _MOST)).sum(dim + 1)
    rest = words.narrow(dim, whole, words.shape[dim] - whole).sum(dim, keepdim=True)
    return torch.cat([parts, rest], dim)
