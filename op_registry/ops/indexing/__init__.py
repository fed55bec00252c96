"""Indexing: reading, writing and accumulating elements by position.

Law: what is read is valid where the index and the element are. What is written is as valid as its source; positions
that nobody writes to keep what they have.

    rules           index, gather, take, masked_select
    assignment      index_put, masked_fill, slice_scatter, copy
    scatter         scatter, index_add and their reductions
    embedding       look-ups of rows, and bags of them
    sparse          reading by index on sparse storage
    sparse_writing  writing by index on sparse storage
    packed          embeddings of sparsely stored indices
    backward        torch's gradient formulas, called by hand
"""

from op_registry.authoring import Sparse, first_of, without_op
from op_registry.ops.indexing import assignment, backward, embedding, packed, rules, scatter, sparse, sparse_writing

__all__ = ["assignment", "backward", "embedding", "packed", "rules", "scatter", "sparse", "sparse_writing"]

# A sparse index of a dense table; then a sparse table.
rules.index_select.lowering(Sparse)(first_of(sparse.index_select_of_dense, without_op(sparse.index_select)))
embedding.embedding.lowering(Sparse)(first_of(sparse.embedding_of_sparse, packed.embedding_of_rows))
