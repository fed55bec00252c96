"""Scans and sorts: the valid elements of each slice, in order.

Law: a scan runs over the valid elements and is invalid elsewhere; a sort puts valid elements first.

    rules    cumsum, cumprod, cummax, cummin, logcumsumexp
    sorting  sort, topk, kthvalue, median, mode, searchsorted, bucketize
"""
