"""Normalization: softmax, and norms by the statistics of a slice.

Law: statistics are those of the valid elements of the slice; the result is valid where the input is.

    softmax         softmax and log_softmax
    norms           layer_norm, rms_norm, group_norm, renorm, weight_norm
    batch_norms     batch_norm and instance_norm, with running statistics
    sparse          norms along sparse dimensions
    sparse_softmax  softmax along sparse dimensions
    packed          norms and softmax along the dense dimensions of hybrid storage
    backward        torch's gradient formulas, called by hand
"""

from op_registry.authoring import Sparse, first_of
from op_registry.ops.normalization import backward, batch_norms, norms, packed, softmax, sparse, sparse_softmax

__all__ = ["backward", "batch_norms", "norms", "packed", "softmax", "sparse", "sparse_softmax"]

# Along sparse dimensions, else row by row along dense ones.
norms.layer_norm.lowering(Sparse)(first_of(sparse.layer_norm, packed.layer_norm))
norms.rms_norm.lowering(Sparse)(first_of(sparse.rms_norm, packed.rms_norm))
