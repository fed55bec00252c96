"""Sparse records, and how operators run on them.

layout.py           how a pattern lists the stored elements: the layouts
compaction.py       from a large mask to index tensors, a chunk at a time
coordinates.py      coordinates and positions; reading, writing, merging and checking by them
record.py           patterns, and records of stored values
convert.py          to dense storage and back, to other layouts, from and to single elements
permuted.py         records whose dimensions are shown in another order, or merged
lowering.py         how an operator runs on sparse records: which calls a lowering takes, and plans
on_values.py        the rule itself on stored values; operators composed of others
segments.py         the stored elements of each slice
slicewise.py        reductions, scans, norms and sorts
contraction.py      sums of products
lookup_gradient.py  sparse gradients of embedding tables
"""
