"""Reductions: one result for each slice.

Law: a slice is reduced over its valid elements; a slice without valid elements gives an invalid result.
Those that sort (median, mode, kthvalue) are in ops/scans/sorting.py.

    rules         sum, prod, mean, var, std, amax, argmax, any, all, logsumexp, norms
    statistics    quantile, covariance and correlation
    torch_masked  the reductions of torch.masked
    sparse        segment reductions over stored elements
"""
