"""Queries: Python values, counts, histograms, positions, distinct values, equality.

Law: the answer is about the valid elements alone, and is a plain tensor or Python value.

    rules   item, equal, allclose, isin, count_nonzero, bincount, histc, histogram, nonzero, unique
    empty   any and all in torch's own Python code, for operands without a valid element
"""
