"""Contractions: sums of products, and distances between rows.

Law: a product with an invalid factor contributes nothing; a sum is valid where at least one of its products is.

    matmul            matrix products, bilinear forms, affine grids
    grouped           products of groups of rows, each with a matrix of its own
    distances         cdist, pdist, cosine_similarity
    sparse            matrix products with sparse factors that have no dense dimensions
    packed            products of hybrid storage with a plain matrix, row by row
    sparse_sums       all other matrix products with sparse operands, element by element
    sparse_distances  cdist, pdist, cosine_similarity on sparse storage
    backward          torch's gradient formulas, called by hand
"""

from op_registry.authoring import Permuted, Sparse, first_of, on_last_dims
from op_registry.ops.contractions import (
    backward,
    distances,
    grouped,
    matmul,
    packed,
    sparse,
    sparse_distances,
    sparse_sums,
)

__all__ = ["backward", "distances", "grouped", "matmul", "packed", "sparse", "sparse_distances", "sparse_sums"]

# Sparse matrices as a whole, else row by row with a plain matrix, else element by element.
matmul.mm.lowering(Sparse)(first_of(sparse.mm, packed.mm, sparse_sums.mm))
matmul.addmm.lowering(Sparse)(first_of(sparse.addmm_with_sparse, packed.addmm, sparse_sums.addmm))
matmul.matmul.lowering(Sparse)(
    first_of(sparse.matmul_with_sparse, packed.matmul_with_plain, sparse_sums.matmul_of_vectors)
)
matmul.linear.lowering(Sparse)(first_of(sparse.linear_with_sparse, packed.linear, sparse_sums.linear))
matmul.linear.lowering(Permuted)(on_last_dims(packed.linear, lambda input, *args, **kwargs: 1))
matmul.mm.lowering(Permuted)(on_last_dims(packed.mm, lambda self, mat2, *args: 1))
matmul.addmm.lowering(Permuted)(packed.addmm_of_permuted)
matmul.matmul.lowering(Permuted)(on_last_dims(packed.matmul_with_plain, lambda self, other: 1))
