"""Elementwise operators.

Law: an element of the result is valid where the corresponding element of every operand is, after broadcasting.

    pointwise    arithmetic, comparisons, logic, elementary and special functions, casts, masked_fill;
                 activation functions; fake quantisation
    differences  operators that combine a few elements of one tensor: cross product, trapezoids, trace
    lists        operators on lists of tensors that need a rule of their own; fused optimizer steps
"""
