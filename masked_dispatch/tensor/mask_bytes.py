"""A bool mask becomes int8 in a graph.

Inductor loads bool into vectors one byte at a time, which is slower than all the arithmetic of a masked mean. A mask
that a graph is given is therefore reinterpreted by an operator of its own (`masked_dispatch::bytes_of`, a copy of one
byte per element); one that the graph itself computes, as a comparison, is converted where it is computed and never
stored as bool.
"""

from __future__ import annotations

import sys
from typing import Any

import torch


def teach_inductor() -> None:
    """Register the lowering of `bytes_of` if inductor is there. Called while tracing: importing it would be slow."""
    lowering = sys.modules.get("torch._inductor.lowering")
    op = torch.ops.masked_dispatch.bytes_of.default
    if lowering is None or op in lowering.lowerings:
        return
    as_operator = lowering.fallback_handler(op, add_to_fallback_set=False)

    def bytes_of(mask: Any) -> Any:
        if _lies_in_memory(mask):
            return as_operator(mask)
        # By way of int32: narrowing a comparison straight to bytes would go one element at a time again.
        return lowering.to_dtype(lowering.to_dtype(mask, torch.int32), torch.int8)

    lowering.register_lowering(op, type_promotion_kind=None)(bytes_of)


def _lies_in_memory(value: Any) -> bool:
    """Whether an inductor value is an input of the graph, or a view of one."""
    from torch._inductor.ir import BaseView, StorageBox

    node = value.data
    if isinstance(node, BaseView):
        node = node.unwrap_view()
    return isinstance(node, StorageBox) and node.is_input_buffer()
