"""Queries: counts, distinct values, histograms, equality.

Law: the answer is about the valid elements, and it is a plain tensor or number.

    rules   dense storage
    sparse  the same on sparse storage
"""

from op_registry.ops.queries import rules, sparse

__all__ = ["rules", "sparse"]
