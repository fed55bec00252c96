"""Indexing: reading, writing and accumulating elements by index.

Law: an element that is read is valid where the index and the element are. An element that is written takes the validity
of its source; elements that are not written keep theirs.

    rules           reading: index, index_select, gather, take, masked_select
    assignment      writing: index_put, put, index_copy, index_fill, slice_scatter, copy
    scatter         accumulating: scatter, scatter_add, scatter_reduce, index_add, max_unpool, segment_reduce
    embedding       embedding and embedding_bag
    sparse          reading by index on sparse storage
    sparse_writing  writing and accumulating by index on sparse storage
    packed          embedding of sparsely stored indices
"""

from op_registry.authoring import Sparse, first_of
from op_registry.ops.indexing import embedding, packed, rules, sparse

# Try a dense table first, whose index may be sparse, then a sparse table.
rules.index_select.lowering(Sparse)(first_of(sparse.index_select_of_dense, sparse.index_select_of_sparse))
embedding.embedding.lowering(Sparse)(first_of(packed.embedding_of_rows, sparse.embedding_of_sparse))
