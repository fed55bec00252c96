"""Sparse records: stored values, the sparsity pattern, and how operators run on them."""
