"""The differentiable boundary between tensors and records, and the sums that the autograd engine makes.

dense.py    unwrapping dense masked tensors to records, and wrapping results
sparse.py   the same for sparse storage
reached.py  what a gradient reached: what of a call's operands contributes to nothing gets 0, not 0 · ∞
engine.py   sums of gradients, of which some are stored sparsely or are torch.sparse tensors
"""
