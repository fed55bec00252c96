"""Indexing: reading, writing and accumulating elements by index.

Law: an element that is read is valid where the index and the element are. An element that is written takes the validity
of its source; elements that are not written keep theirs.

    rules           reading: index, index_select, gather, take, masked_select
    assignment      writing: index_put, put, index_copy, index_fill, slice_scatter, copy
    scatter         accumulating: scatter, scatter_add, scatter_reduce, index_add, max_unpool, segment_reduce
    embedding       embedding and embedding_bag
    sparse          reading, writing and accumulating by index on sparse storage
"""
