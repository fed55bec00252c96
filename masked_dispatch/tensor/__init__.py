"""The tensor subclasses: dense and sparse masked tensors as values, and how tensors share masks.

masked_tensor.py  MaskedTensor: accessors, protocol hooks (flatten, copy, pickle), wrap
sparse_tensor.py  SparseMaskedTensor: values and a sparsity pattern instead of data and a mask
shared_storage.py  the stored tensors that a sparse tensor and its detached copies share
whole_functions.py  functions that Dynamo does not trace through, because they have rules inside them
in_transform.py   masked tensors made inside a functorch transform
other_devices.py  tensors of libraries whose device torch's C++ does not know
mask_sharing.py   copy-on-write of masks between a tensor, its views and results
extent_sharing.py  one extent for a tensor and its views
shared_places.py  elements that share a memory location
write_locks.py    locks for in-place operations of several threads
mask_bytes.py     converting a bool mask to int8 in a compiled graph
buffers.py        x.new_tensor, x.new and x.data = y
checks.py         checks of the data and masks that callers pass
extent_in_graphs.py  the pieces of an extent as inner tensors, in graphs
file_format.py    the file format, its versions, and reading files
fills.py          checks of the values that replace invalid elements
layout_checks.py  whether a storage layout fits a shape
storage_conversions.py  methods that store the same tensor in another way
conversions.py    conversions to sparse storage, which torch.export and torch.compile record differently
all_valid.py      methods that return no tensor: numpy, tolist
no_memory.py      methods that ask for one piece of memory: refused
saved.py          checks of the contents of a file, before a tensor is rebuilt from it
saved_extents.py  which positions are there, in a file
indexing.py       assignment by index to sparse storage
index_writes.py   x[:, a:-b] = v: the part of each sample, and of sparse storage, in one operator
cache_key.py      the key of a masked tensor in torch's caches of compiled graphs
code_version.py   the version of the code, in graphs that make masked tensors
named_pieces.py   x.stored_bytes, x.values(), x.indices() …: the stored values and index tensors
printing.py       __repr__
notebooks.py      _repr_html_: the mask as a small picture
colours.py        the colours of valid and invalid elements in pictures
validity_blocks.py  the valid share of each block of a tensor, for pictures of any size
shown_elements.py  reads the elements to print, from any storage
messages.py       error texts that several functions raise
"""
