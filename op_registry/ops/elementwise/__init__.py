"""Elementwise operators.

Law: an element of the result is valid where the corresponding element of every operand is, after broadcasting.

    pointwise    arithmetic, comparisons, logic, elementary and special functions, casts, masked_fill
    activations  activation functions
    differences  operators that combine a few elements of one tensor: cross product, trapezoids, trace
    foreach      operators on lists of tensors that need a rule of their own
    quantization fake quantisation
    optimizers   fused optimizer steps
    sparse       cross product, trapezoids, trace and glu on sparse storage
"""

from op_registry.authoring import ON_STORED_ROWS, Permuted, Sparse, first_of
from op_registry.ops.elementwise import activations, sparse

# Along dense dimensions first, then along sparse ones.
activations.glu.lowering(Sparse)(first_of(ON_STORED_ROWS, sparse.glu))
activations.glu.lowering(Permuted)(ON_STORED_ROWS)
