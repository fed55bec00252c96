"""Reductions: one result for each slice.

Law: a slice is reduced over its valid elements; one that has none is invalid.

    rules         sums, means, extrema, norms, variances
    statistics    median, quantiles, covariance
    torch_masked  torch.masked"s own functions
    sparse        by segments of stored elements
    backward      torch's gradient formulas, called by hand
"""

from op_registry.ops.reductions import backward, rules, sparse, statistics, torch_masked

__all__ = ["backward", "rules", "sparse", "statistics", "torch_masked"]
