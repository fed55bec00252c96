"""Contractions: sums of products, and distances between rows.

Law: a factor that is invalid contributes nothing; a sum is valid where at least one of its products is.

    matmul            products of dense records
    distances         cdist, pdist, cosine similarity
    sparse            products with one sparse factor
    packed            products of hybrid storage with a plain weight
    sparse_sums       what is left: several sparse factors, and sums with another operand
    sparse_distances  distances of sparse records
    backward          torch's gradient formulas, called by hand
"""

from op_registry.authoring import Permuted, Sparse, first_of, on_last_dims
from op_registry.ops.contractions import backward, distances, matmul, packed, sparse, sparse_distances, sparse_sums

__all__ = ["backward", "distances", "matmul", "packed", "sparse", "sparse_distances", "sparse_sums"]

# A sparse factor as a whole; then row by row with a plain matrix; then element by element.
matmul.mm.lowering(Sparse)(first_of(sparse.mm, packed.mm, sparse_sums.mm))
matmul.addmm.lowering(Sparse)(first_of(sparse.addmm_with_sparse, packed.addmm, sparse_sums.addmm))
matmul.matmul.lowering(Sparse)(
    first_of(sparse.matmul_with_sparse, packed.matmul_with_plain, sparse_sums.matmul_of_vectors)
)
matmul.linear.lowering(Sparse)(first_of(sparse.linear_with_sparse, packed.linear, sparse_sums.linear))
matmul.linear.lowering(Permuted)(on_last_dims(packed.linear, lambda x, *args, **kwargs: 1))
matmul.matmul.lowering(Permuted)(on_last_dims(packed.matmul_with_plain, lambda x, other: 1))
