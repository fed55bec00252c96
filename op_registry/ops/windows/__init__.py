"""Windows: convolution, pooling, interpolation.

Law: each result is computed from the valid elements of its window; windows without any are invalid.

    convolution    convolutions, and their transposes
    pooling        averages and maxima
    interpolation  resizing
    sparse         nearest neighbours, on sparse storage
    backward       torch's gradient formulas, called by hand
"""

from op_registry.ops.windows import backward, convolution, interpolation, pooling, sparse

__all__ = ["backward", "convolution", "interpolation", "pooling", "sparse"]
