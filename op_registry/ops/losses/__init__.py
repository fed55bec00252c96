"""Losses.

Law: a loss is valid where its input and target are; "mean" divides by the number of valid losses, "sum" adds them.

    rules                 elementwise losses, and losses between vectors
    classification        losses over classes, and their labels
    ctc                   alignments of sequences with their targets, all or nothing for each sample
    python_functions      losses that torch writes in Python and that divide by a size
    linear_cross_entropy  torch's fused operator, in chunks of the batch
    sparse                losses over classes and between vectors on sparse storage, composed of other operators
    packed                losses on stored values: elementwise, or over one dense dimension of classes
"""

from op_registry.authoring import Sparse, first_of
from op_registry.ops.losses import classification, packed, sparse

# Classes along a sparse dimension, else row by row along a dense one.
classification.nll_loss.lowering(Sparse)(first_of(sparse.nll_loss, packed.nll_loss))
classification.cross_entropy_loss.lowering(Sparse)(first_of(sparse.cross_entropy_loss, packed.cross_entropy_loss))
