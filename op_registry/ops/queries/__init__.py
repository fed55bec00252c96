"""Queries: Python values, counts, histograms, positions, distinct values, equality.

Law: the answer is about the valid elements alone, and is a plain tensor or Python value.

    rules   item, equal, allclose, isin, count_nonzero, bincount, histc, histogram, nonzero, unique
    sparse  count_nonzero, nonzero, histc, histogram, unique and equality on sparse storage
"""

from op_registry.ops.queries import rules, sparse

__all__ = ["rules", "sparse"]
