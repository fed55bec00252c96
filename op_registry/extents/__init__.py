"""Extents: which positions of a padded batch are there.

Padding is no unknown value of a sample; it is not there. A record may carry, beside its validity, an *extent*: a
conjunction of *factors*, each a boolean that depends on some dimensions and numbers positions along some of these. What
becomes of it in a call follows from the dimensions that the operator's rule states, here and in no rule.

    factors    factors and extents; what is known of each dimension
    follow     the extents of a call's results
    combine    factors that meet in one result
    regroup    dimensions that are merged and split
    remembered  the same calls again
    stored     what an extent needs of sparse records
    layouts    records with extents in another layout
    slices     views that leave positions out
    joins      operands one behind the other
    states     carried states, which live on past a sample's end
    batches    tensors that become samples of one
    samples    calls that act within each sample: flip, roll, gather to the front
    exported   what an exported program says of its example's
    plain      what is known of dimensions, in files and messages
    regions    parts of a tensor's memory: views of it, and writes through them
"""

from op_registry.extents.batches import of_lengths
from op_registry.extents.ends import keeps_all
from op_registry.extents.factors import along_dim, factors_of, there
from op_registry.extents.follow import with_factors, without
from op_registry.extents.remembered import finished
from op_registry.extents.samples import WITHIN_SAMPLES
from op_registry.records.extent import Factor, Merged, as_positions, maybe_empty

__all__ = [
    "WITHIN_SAMPLES",
    "Factor",
    "Merged",
    "along_dim",
    "as_positions",
    "factors_of",
    "finished",
    "keeps_all",
    "maybe_empty",
    "of_lengths",
    "there",
    "with_factors",
    "without",
]
