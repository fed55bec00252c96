"""Preparation for torch.compile, when something is first traced.

* Compiled regions may return masked outputs that the loss does not depend on.
* Higher-order operators (checkpoint …) take masked tensors.
* Dynamo rewrites addcmul_, addcdiv_ and add_ with numbers in optimizers to inductor's fused multiply-add.
* x.new_tensor(data) is the method of the masked tensor.
"""

from __future__ import annotations

import functools

from masked_dispatch.compiler_internals import (
    accept_unused_outputs,
    before_tracing,
    dynamo_is_loaded,
    fused_multiply_add,
    record_new_tensor_of,
)
from masked_dispatch.dispatch.fast_paths import elementwise_kernel
from masked_dispatch.dispatch.kernel_table import kernel_table
from masked_dispatch.tensor.masked_tensor import MaskedTensor, wrap
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor, refuse_tangent
from masked_dispatch.torch_internals import serve_higher_order_operators
from op_registry.categories import ELEMENTWISE, run_elementwise
from op_registry.rule import Rule


def install() -> None:
    """Register `prepare`: called once, when the package is imported."""
    before_tracing.append(prepare)


def prepare() -> None:
    """Called whenever a masked tensor enters a graph that is being traced; has an effect once."""
    accept_unused_outputs({MaskedTensor: lambda zeros: wrap(zeros, None), SparseMaskedTensor: refuse_tangent})
    serve_higher_order_operators()
    if dynamo_is_loaded():
        record_new_tensor_of(MaskedTensor)
        _teach_fused_multiply_add()


@functools.cache
def _teach_fused_multiply_add() -> None:
    """fma(a, b, c) is a · b + c: elementwise, like addcmul."""
    op = fused_multiply_add()
    traits = {"derivative": "bilinear"}
    # Not through the registry: its version would change during tracing of a graph that is guarded on it.
    rule = Rule(
        (op,), ELEMENTWISE, run_elementwise, takes_op=True, where="masked_dispatch/dispatch/compile.py", traits=traits
    )
    kernel_table.put(op, elementwise_kernel(op, rule))
