"""What torch.compile is told beyond the rules, once somebody compiles.

* Compiled regions may return masked outputs that the loss does not depend on.
* Higher-order operators (checkpoint …) take masked tensors.
* Dynamo rewrites addcmul_, addcdiv_ and add_ with numbers in optimizers to a fused multiply-add of inductor's.
* A bool mask becomes int8 in a graph, as follows.

Inductor loads bool into vectors one byte at a time, which is slower than all the arithmetic of a masked mean. A mask
that a graph is given is therefore reinterpreted by an operator of its own (`masked_dispatch::bytes_of`, a copy of one
byte per element); one that the graph itself computes, as a comparison, is converted where it is computed and never
stored as bool.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch


def prepare_for_tracing() -> None:
    """Called whenever a masked tensor enters a graph that is being traced; does something once."""
    from masked_dispatch.interception import accept_unused_outputs, open_higher_order_operators
    from masked_dispatch.storage.wrapper import SparselyStored, refuse_tangent
    from masked_dispatch.tensor import MaskedTensor, wrap

    accept_unused_outputs({MaskedTensor: lambda zeros: wrap(zeros, None), SparselyStored: refuse_tangent})
    open_higher_order_operators()
    if "torch._dynamo" in sys.modules:
        _teach_fused_multiply_add()


@functools.cache
def _teach_fused_multiply_add() -> None:
    """fma(a, b, c) is a · b + c: elementwise, like addcmul. It is made when inductor's primitives are imported."""
    import torch._inductor.inductor_prims

    from masked_dispatch.dispatch import kernels
    from masked_dispatch.elementwise import elementwise_kernel
    from op_registry.categories import ELEMENTWISE, run_elementwise
    from op_registry.rule import Rule

    op = torch.ops.prims.fma.default
    traits = {"derivative": "bilinear"}
    # Not through the registry: its version would change in the middle of a graph that relies on it.
    rule = Rule((op,), ELEMENTWISE, run_elementwise, takes_op=True, where="masked_dispatch/compile.py", traits=traits)
    kernels.put(op, elementwise_kernel(op, rule))


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
