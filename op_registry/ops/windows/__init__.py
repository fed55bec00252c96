"""Windows: convolution, pooling, interpolation, grid sampling.

Law: each result is computed from the valid elements of its window; a window without valid elements is invalid.

    convolution    convolutions and transposed convolutions
    pooling        average and maximum pooling
    padding        convolution and pooling inside masked_dispatch.windows("padding"), by the samples' boxes
    lp_pooling     the sums inside lp_pool1d, 2d and 3d
    interpolation  resizing: nearest, linear, bicubic, antialiased; grid_sample; padding and resizing of padded batches
"""
