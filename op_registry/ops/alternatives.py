"""Sparse lowerings of which a rule has several, each written in the order in which they are tried.

What comes first asks the most of a call and costs the least; what comes last lists single elements.
"""

from __future__ import annotations

from op_registry.lowering import first_of
from op_registry.ops import (
    activations,
    classification,
    embedding,
    indexing,
    matmul,
    movement,
    norms,
    packed,
    sparse_composed,
    sparse_indexing,
    sparse_movement,
    sparse_norms,
    sparse_products,
    sparse_sums,
)
from op_registry.sparse import Sparse

# Products: a sparse factor as a whole, then row by row with a plain matrix, then element by element.
matmul.mm.lowering(Sparse)(first_of(sparse_products.mm, packed.mm, sparse_sums.mm))
matmul.addmm.lowering(Sparse)(first_of(sparse_products.addmm_with_sparse, packed.addmm, sparse_sums.addmm))
matmul.matmul.lowering(Sparse)(
    first_of(sparse_products.matmul_with_sparse, packed.matmul_with_plain, sparse_sums.matmul_of_vectors)
)
matmul.linear.lowering(Sparse)(first_of(sparse_products.linear_with_sparse, packed.linear, sparse_sums.linear))

# Norms and losses: over sparse dimensions, then over dense ones, row by row.
norms.layer_norm.lowering(Sparse)(first_of(sparse_norms.layer_norm, packed.layer_norm))
norms.rms_norm.lowering(Sparse)(first_of(sparse_norms.rms_norm, packed.rms_norm))
classification.nll_loss.lowering(Sparse)(first_of(sparse_composed.nll_loss, packed.nll_loss))
classification.cross_entropy_loss.lowering(Sparse)(
    first_of(sparse_composed.cross_entropy_loss, packed.cross_entropy_loss)
)
activations.glu.lowering(Sparse)(first_of(sparse_composed.glu, packed.glu))

# Indexing: a sparse index of a dense table, then a sparse table.
indexing.index_select.lowering(Sparse)(
    first_of(sparse_indexing.index_select_of_dense, sparse_movement.moving(sparse_movement.index_select))
)
embedding.embedding.lowering(Sparse)(first_of(sparse_indexing.embedding_of_sparse, packed.embedding_of_rows))
movement.flip.lowering(Sparse)(first_of(sparse_indexing.rot90, sparse_movement.moving(sparse_movement.flip)))
