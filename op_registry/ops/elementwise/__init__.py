"""Elementwise operators.

Law: an element of the result is valid where that element of every operand is.

    pointwise    functions of one, two and more operands
    activations  those of torch.nn.functional
    differences  neighbouring elements: cross product, trapezoids, trace
    foreach      operators on lists of tensors
    optimizers   fused optimizer steps
    sparse       differences and gates on sparse storage
    packed       gates along a dense dimension of hybrid storage
    backward     torch's gradient formulas, called by hand
"""

from op_registry.authoring import Sparse, first_of
from op_registry.ops.elementwise import (
    activations,
    backward,
    differences,
    foreach,
    optimizers,
    packed,
    pointwise,
    sparse,
)

__all__ = ["activations", "backward", "differences", "foreach", "optimizers", "packed", "pointwise", "sparse"]

# Halves of a sparse dimension; then halves of a dense one.
activations.glu.lowering(Sparse)(first_of(sparse.glu, packed.glu))
