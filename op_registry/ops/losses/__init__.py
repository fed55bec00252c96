"""Losses.

Law: a loss is valid where its input and target are; "mean" divides by the number of valid losses, "sum" adds them.

    rules                 elementwise losses, and losses between vectors
    classification        losses over classes, and their labels; linear_cross_entropy in chunks of the batch
    ctc                   alignments of sequences with their targets, all or nothing for each sample
    python_functions      losses that torch writes in Python and that divide by a size
    sparse                losses on sparse storage: composed of other operators, or on stored values
"""
