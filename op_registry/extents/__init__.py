"""Extents: which positions of a padded batch are there.

Padding is no unknown value of a sample; it is not there. A record may carry, beside its validity, an *extent*: a
conjunction of *factors*, each a boolean that depends on some dimensions and numbers positions along some of these. What
becomes of it in a call follows from the dimensions that the operator's rule states, here and in no rule.

    run         run a rule where operands have extents: what follows from its dimensions, or a refusal
    follow      the extents of results along dimensions that are batch, worked along or gone
    meetings    factors that move to a result, and meet there
    slices      parts of dimensions, and ends of a batch
    samples     calls that act within each sample: flips, sorts, windows
    indices     reading and writing at computed positions
    joins       operands one behind the other, new dimensions, other sizes
    states      carried states, which live on past a sample's end; choices
    writes      another mask, accumulation, and writes to parts of memory
    remembered  the same calls again
    found       the extent that a boolean says; packed batches, exported programs
    pieces      extents apart, for graphs, files and messages
    factors     the factors of a record's extent, and the algebra of their booleans
"""

from op_registry.extents.factors import along_dim, factors_of, first_known, there
from op_registry.extents.follow import with_factors, without
from op_registry.extents.joins import of_lengths
from op_registry.extents.remembered import finished
from op_registry.extents.samples import WITHIN_SAMPLES
from op_registry.extents.slices import keeps_all
from op_registry.records.extent import Factor, Merged, as_positions, maybe_empty

__all__ = [
    "WITHIN_SAMPLES",
    "Factor",
    "Merged",
    "along_dim",
    "as_positions",
    "factors_of",
    "finished",
    "first_known",
    "keeps_all",
    "maybe_empty",
    "of_lengths",
    "there",
    "with_factors",
    "without",
]
