"""The tensor subclasses: dense and sparse masked tensors as values, and how tensors share masks.

masked_tensor.py  MaskedTensor: accessors, protocol hooks (flatten, copy, pickle), wrap
sparse_tensor.py  SparseMaskedTensor: values and a sparsity pattern instead of data and a mask
storage.py        what sparse storage stores, under torch's names; methods that store the same tensor in another way
in_transform.py   masked tensors made inside a functorch transform
mask_sharing.py   copy-on-write of masks between a tensor, its views and results
extents.py        one extent for a tensor and its views, and its pieces in graphs
memory.py         x.new_tensor, x.new and x.data = y; locks for in-place operations of several threads
assignment.py     x[0, 1:] = v; elements that share a memory location
checks.py         checks of the data and masks that callers pass
arguments.py      checks of fills and of storage layouts
file_format.py    the file format, its versions, reading files, and checks of what they contain
leaving.py        methods that return no tensor, or ask for one piece of memory
traced.py         what compiled graphs, and libraries with devices of their own, need of masked tensors
shown.py          what is shown of a tensor of any size: a few elements, the valid share of each block
printing.py       repr, and a picture of the mask in a notebook
messages.py       error texts that several functions raise
"""
