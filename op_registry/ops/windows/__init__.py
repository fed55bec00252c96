"""Windows: convolution, pooling, interpolation.

Law: each result is computed from the valid elements of its window; a window without valid elements is invalid.

    convolution    convolutions and transposed convolutions
    pooling        average and maximum pooling
    interpolation  resizing: nearest, linear, bicubic, antialiased
    sparse         nearest-neighbour interpolation on sparse storage
    backward       torch's gradient formulas, called by hand
"""

from op_registry.ops.windows import backward, convolution, interpolation, pooling, sparse

__all__ = ["backward", "convolution", "interpolation", "pooling", "sparse"]
