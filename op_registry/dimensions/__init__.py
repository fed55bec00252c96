"""Dimensions: which of them an operator works on, stated once for each rule.

A statement gives every dimension of a call a *label*. Dimensions with one label are one index; what the operator does
along a label is its *role*::

    Equation("mk,kn->mn")              mm: k is contracted, m and n are batch
    Equation("*k,nk,+->*n")            linear: any batch; the bias is added, elementwise with the result
    Slices("one")                      sum(dim): each slice over `dim` gives one result
    Slices("each")                     softmax(dim), cumsum(dim): one result for each element of a slice
    LastDims("normalized_shape")       layer_norm: slices over the last dimensions; parameters belong to them
    LastDims(2)                        inv: the slices are matrices
    Cut(start="start", stop="end")     slice: a part of the dimension `dim`
    Moved("dims", by="shifts")         roll: elements change places along `dims`, in an order that is known
    Elementwise()                      every dimension is batch

Along a *batch* label, an operator treats every index by itself: the result at one index depends on the operands at this
index alone. From that follow the lowerings to sparse and packed storage, the fast path for rows, slices that are valid
as a whole or not at all, the oracles of operators of other libraries, and the text of a refusal. A statement is true of
plain torch, which the law "dims" of conformance asks (:mod:`op_registry.conformance.laws.dimensions`).

    labels     labels and roles; what a statement is
    equation   statements by equations
    slices     slices along dimensions that an argument names, or the last ones; rows that an operator treats by itself
    movements  moves, joins, windows, lookups, losses
    views      which dimension of a view is whose; the part of a dimension that a call shows
    sizes      questions about sizes, which are symbols in a graph
"""
