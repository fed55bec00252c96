"""What torch.compile is told beyond the rules, once somebody compiles.

* Compiled regions may return masked outputs that the loss does not depend on.
* Higher-order operators (checkpoint …) take masked tensors.
* Dynamo rewrites addcmul_, addcdiv_ and add_ with numbers in optimizers to a fused multiply-add of inductor's.
"""

from __future__ import annotations

import functools
import sys

from masked_dispatch.dispatch.fast_paths import elementwise_kernel
from masked_dispatch.dispatch.ladder import kernels
from masked_dispatch.tensor.masked_tensor import MaskedTensor, wrap
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor, refuse_tangent
from masked_dispatch.torch_internals import accept_unused_outputs, before_tracing, open_higher_order_operators
from op_registry.categories import ELEMENTWISE, run_elementwise
from op_registry.rule import Rule


def install() -> None:
    """Be told when a graph is traced: called once, when the package is imported."""
    before_tracing.append(prepare)


def prepare() -> None:
    """Called whenever a masked tensor enters a graph that is being traced; does something once."""
    accept_unused_outputs({MaskedTensor: lambda zeros: wrap(zeros, None), SparseMaskedTensor: refuse_tangent})
    open_higher_order_operators()
    if "torch._dynamo" in sys.modules:
        _teach_fused_multiply_add()


@functools.cache
def _teach_fused_multiply_add() -> None:
    """fma(a, b, c) is a · b + c: elementwise, like addcmul. It is made when inductor's primitives are imported."""
    import torch._inductor.inductor_prims

    op = torch.ops.prims.fma.default
    traits = {"derivative": "bilinear"}
    # Not through the registry: its version would change in the middle of a graph that relies on it.
    rule = Rule(
        (op,), ELEMENTWISE, run_elementwise, takes_op=True, where="masked_dispatch/dispatch/compile.py", traits=traits
    )
    kernels.put(op, elementwise_kernel(op, rule))
