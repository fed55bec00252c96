"""Recurrent networks over padded and packed sequences.

Law: a step is taken for valid inputs only; the last state of a sequence is that of its last valid step.

    rules    RNN, LSTM, GRU and their cells
    packing  pack_padded_sequence and its inverse
    samples  calls for conformance, of operators that torch's database does not know
"""

from op_registry.ops.recurrent import packing, rules, samples

__all__ = ["packing", "rules", "samples"]
