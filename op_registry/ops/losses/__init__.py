"""Losses.

Law: elementwise where input and target are valid; "mean" divides by what took part, "sum" adds it up.

    rules                 losses of operands of one shape
    classification        losses over classes, and their labels
    linear_cross_entropy  torch's fused operator
    sparse                composed of operators that keep elements where they are stored
    packed                hybrid storage, row by row
    backward              torch's gradient formulas, called by hand
"""

from op_registry.authoring import Sparse, first_of
from op_registry.ops.losses import backward, classification, linear_cross_entropy, packed, rules, sparse

__all__ = ["backward", "classification", "linear_cross_entropy", "packed", "rules", "sparse"]

# Classes along a sparse dimension; then along a dense one, row by row.
classification.nll_loss.lowering(Sparse)(first_of(sparse.nll_loss, packed.nll_loss))
classification.cross_entropy_loss.lowering(Sparse)(first_of(sparse.cross_entropy_loss, packed.cross_entropy_loss))
