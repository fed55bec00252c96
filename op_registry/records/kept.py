"""A cache on each mask object for values computed from the mask; a write to the mask empties it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from op_registry.records.tracing import being_traced, under_transform

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
