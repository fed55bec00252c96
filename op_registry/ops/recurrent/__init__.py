"""Recurrent networks over padded and packed sequences.

Law: only valid steps update the state; the last state of a sequence is that after its last valid step.

    rules    RNN, LSTM, GRU and their cells, also on packed batches
    packing  pack_padded_sequence, pad_packed_sequence and pad_sequence
    samples  calls for conformance, which torch's operator database lacks
"""
