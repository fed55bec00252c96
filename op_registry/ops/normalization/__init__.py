"""Normalization: softmax, and norms by the statistics of a slice.

Law: statistics are those of the valid elements of the slice; the result is valid where the input is.

    softmax         softmax and log_softmax
    norms           layer_norm, group_norm, rms_norm, weight norms
    batch_norms     batch_norm and its running statistics
    sparse          norms along sparse dimensions
    sparse_softmax  softmax along sparse dimensions
    packed          norms along the dense dimensions of hybrid storage
    backward        torch's gradient formulas, called by hand
"""

from op_registry.authoring import Sparse, first_of
from op_registry.ops.normalization import backward, batch_norms, norms, packed, softmax, sparse, sparse_softmax

__all__ = ["backward", "batch_norms", "norms", "packed", "softmax", "sparse", "sparse_softmax"]

# Along sparse dimensions; then along dense ones, row by row.
norms.layer_norm.lowering(Sparse)(first_of(sparse.layer_norm, packed.layer_norm))
norms.rms_norm.lowering(Sparse)(first_of(sparse.rms_norm, packed.rms_norm))
