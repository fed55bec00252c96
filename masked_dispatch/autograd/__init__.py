"""The differentiable boundary between tensors and records, and the sums that the autograd engine makes.

dense.py   unwrapping dense masked tensors to records, and wrapping results
sparse.py  the same for sparse storage
engine.py  sums of gradients, of which some are stored sparsely or are torch.sparse tensors
"""
