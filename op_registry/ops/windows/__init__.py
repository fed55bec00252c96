"""Windows: convolution, pooling, interpolation, grid sampling.

Law: each result is computed from the valid elements of its window; a window without valid elements is invalid.

    convolution    convolutions and transposed convolutions
    pooling        average and maximum pooling
    padding        convolution and pooling inside masked_dispatch.windows("padding")
    lp_pooling     the sums inside lp_pool1d, 2d and 3d
    crops          the bounding boxes of samples, and their windows
    interpolation  resizing: nearest, linear, bicubic, antialiased
    grid_sampling  grid_sample
    samples        padding and interpolation of tensors that know which positions are there
    sparse         nearest-neighbour interpolation on sparse storage
"""
