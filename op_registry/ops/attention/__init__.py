"""Attention.

Law: for each query a softmax over its valid keys, and the mean of their values weighted by it. A query without a valid
key has no valid result.

    rules      scaled_dot_product_attention and its kernels
    layers     the fused layers of torch.nn
    tokens     an encoder layer on the valid tokens alone, without the padding
    modules    nn.MultiheadAttention and the Transformer layers in training
    packed     attention of packed batches, one sequence at a time or by a kernel for sequences
    by_bounds  torch's kernels for sequences of different lengths, on a GPU
"""
