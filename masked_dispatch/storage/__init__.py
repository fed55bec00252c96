"""Sparse storage: the wrapper, its differentiable boundary, and how operators get to it.

A sparsely stored masked tensor is a MaskedTensor like any other: ``layout`` is strided, semantics are the same, and
``x.storage_layout`` says how it is stored. What is not stored is invalid.
"""
