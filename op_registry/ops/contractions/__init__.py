"""Contractions: sums of products, and distances between rows.

Law: a product with an invalid factor contributes nothing; a sum is valid where at least one of its products is.

    matmul            matrix products, bilinear forms, affine grids
    grouped           products of groups of rows, each with a matrix of its own
    distances         cdist, pdist, cosine_similarity
    sparse_distances  cdist, pdist, cosine_similarity on sparse storage
"""
