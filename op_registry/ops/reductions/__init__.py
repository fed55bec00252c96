"""Reductions: one result for each slice.

Law: a slice is reduced over its valid elements; a slice without valid elements gives an invalid result.

    rules         sum, mean, var, amax, argmax, any, logsumexp, norms
    statistics    quantile, covariance and correlation
    torch_masked  the reductions of torch.masked
    sparse        segment reductions over stored elements
    backward      torch's gradient formulas, called by hand
"""

from op_registry.ops.reductions import backward, rules, sparse, statistics, torch_masked

__all__ = ["backward", "rules", "sparse", "statistics", "torch_masked"]
