"""Indexing, assignment, scatters and accumulation by index on bare records, small enough to be checked by eye.

Every form of reading, writing and adding, the laws ask by oracles (op_registry/conformance/oracles/positions.py).
"""

from __future__ import annotations

import math

import pytest
import torch

from bare_records import apply, masked, plain, shows, valid_of
from op_registry import MaskedSemanticsError
from op_registry.authoring import Dense

aten = torch.ops.aten
nan, inf = math.nan, math.inf
T, F = True, False


def test_an_invalid_index_reads_an_invalid_element():
    x = masked([[1, 2, 3], [4, 5, 6]], [[T, F, T], [T, T, F]])
    shows(apply(aten.index.Tensor, x, [plain([1, 0])]), [[4, 5, None], [1, None, 3]])
    shows(apply(aten.index.Tensor, x, [None, masked([2, 10**9, 0], [T, F, T])]), [[3, None, 1], [None, None, 4]])
    shows(apply(aten.index.Tensor, x, [plain([1, 1]), masked([1, -(10**9)], [T, F])]), [5, None])


def test_an_invalid_entry_of_a_mask_selects_nothing():
    x = masked([1, 2, 3, 4], [T, F, T, T])
    shows(apply(aten.index.Tensor, x, [masked([T, T, T, T], [T, F, F, T])]), [1, 4])
    shows(apply(aten.masked_select.default, x, masked([T, T, T, T], [T, T, F, T])), [1, None, 4])
    rows = Dense(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[T], [F]]))
    shows(apply(aten.index.Tensor, rows, [plain([T, T]), masked([0, 8], [T, F])]), [1, None])


def test_an_index_that_is_valid_and_out_of_range_still_raises():
    x, index = plain([1.0, 2.0, 3.0]), masked([3, 9], [T, F])
    values = plain([5.0, 6.0])
    for op, args in [
        (aten.index.Tensor, ([index],)),
        (aten.index_put.default, ([index], values)),
        (aten.index_select.default, (0, index)),
        (aten.index_copy.default, (0, index, values)),
        (aten.index_fill.int_Scalar, (0, index, 1.0)),
        (aten.index_add.default, (0, index, values)),
        (aten.index_reduce.default, (0, index, values, "amax")),
        (aten.gather.default, (0, index)),
        (aten.scatter.src, (0, index, values)),
        (aten.scatter_add.default, (0, index, values)),
        (aten.scatter_reduce.two, (0, index, values, "prod")),
        (aten.put.default, (index, values)),
    ]:
        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)|index"):
            apply(op, x, *args)


def test_the_pieces_that_torchs_decompositions_use():
    x, at = masked([1, 2, 3], [T, F, T]), masked([0, 1, 99, 2], [T, T, F, T])
    chosen = masked([T, F, F, T], [T, T, T, F])
    shows(apply(aten._unsafe_masked_index.default, x, chosen, [at], 7), [1, 7, 7, None])
    shows(apply(aten._unsafe_masked_index.default, x, plain([T, T, T, F]), [at], 7), [1, None, None, 7])
    added = apply(aten._unsafe_masked_index_put_accumulate.default, x, chosen, [at], plain([10, 20, 30, 40]))
    shows(added, [11, None, 3])
    added = apply(
        aten._unsafe_masked_index_put_accumulate.default, x, plain([F, T, T, T]), [at], plain([10, 20, 30, 40])
    )
    shows(added, [1, 20, 43])
    put = apply(aten._index_put_impl.default, x, [plain([0, 1])], masked([8, 9], [F, T]), False, True)
    shows(put, [None, 9, 3])
    joined = apply(aten._chunk_cat.default, [masked([1, 2, 3], [T, F, T]), plain([4])], 0, 2)
    shows(joined, [[1, None, 4], [3, 0, 0]])


def test_assignment_writes_value_and_validity():
    x = masked([1, 2, 3, 4], [T, F, T, F])
    shows(apply(aten.index_put.default, x, [plain([0, 1])], masked([10, 20], [F, T])), [None, 20, 3, None])
    shows(apply(aten.index_put.default, x, [masked([0, 99, -1], [T, F, T])], plain([7, 8, 9])), [7, None, 3, 9])
    shows(apply(aten.index_put.default, x, [masked([T, T, T, T], [T, T, F, F])], plain(0)), [0, 0, 3, None])
    shows(apply(aten.put.default, x, masked([[3], [50]], [[T], [F]]), plain([[7], [8]])), [1, None, 3, 7])
    shows(apply(aten.scatter.value, x, 0, masked([3, 50], [T, F]), 7), [1, None, 3, 7])
    shows(apply(aten.slice_scatter.default, plain([1, 2, 3]), masked([5, 6], [F, T]), 0, 1, 3), [1, None, 6])
    shows(apply(aten.copy.default, x, masked([5.0], [T])), [5, 5, 5, 5])


def test_accumulation_by_index():
    x = masked([1.0, nan, nan, 4.0], [T, F, F, T])
    source, at = masked([10.0, nan, 30.0, nan], [T, F, T, F]), plain([0, 0, 1, 2])
    for op, args in [(aten.scatter_add.default, (0, at, source)), (aten.put.default, (at, source, True))]:
        shows(apply(op, x, *args), [11, 30, None, 4])
    shows(apply(aten.index_add.default, x, 0, masked([0, 99], [T, F]), plain([5.0, nan]), alpha=2), [11, None, None, 4])
    shows(apply(aten.scatter.value_reduce, x, 0, masked([0, 99], [T, F]), 3.0, reduce="multiply"), [3, None, None, 4])
    everywhere = apply(aten.scatter_add.default, plain([1.0, 2.0]), 0, plain([0, 0]), masked([nan, 5.0], [F, T]))
    assert everywhere.validity is None


def test_segments():
    x, lengths = masked([1.0, nan, nan, 4.0, nan], [T, F, F, T, F]), plain([3, 0, 1, 1])
    for reduce, empty in (("sum", 0), ("prod", 1), ("max", -inf), ("min", inf)):
        shows(apply(aten.segment_reduce.default, x, reduce, lengths=lengths), [1, empty, 4, None])
    mean = apply(aten.segment_reduce.default, x, "mean", lengths=lengths)
    assert valid_of(mean).tolist() == [T, T, T, F]
    assert mean.data[1].isnan()
    shows(apply(aten.segment_reduce.default, x, "mean", lengths=lengths, initial=2.0), [3, 2, 6, 2])
    with pytest.raises(MaskedSemanticsError, match="lengths of shape"):
        apply(aten.segment_reduce.default, x, "sum", lengths=masked([4, 1], [T, F]))
