"""Normalization: softmax, and norms by the statistics of a slice.

Law: statistics are those of the valid elements of the slice; the result is valid where the input is.

    softmax         softmax and log_softmax
    norms           layer_norm, rms_norm, renorm, weight_norm
    channels        group_norm, and the channels of a dense or a sparse record
    batch_norms     batch_norm and instance_norm, with running statistics
    sparse          softmax and renorm along sparse dimensions
"""
