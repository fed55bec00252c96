"""Embedding, bags and averages on bare records, against what torch gives for the valid elements alone."""

from __future__ import annotations

import math

import pytest
import torch

from bare_records import apply, seen
from op_registry import MaskedSemanticsError
from op_registry.authoring import Dense
from op_registry.sparse import lookup_gradient as row_gradients

aten = torch.ops.aten


def flags(mask):
    return torch.as_tensor(mask).to(torch.int8)


# ---------------------------------------------------------------------------------------------------------- embedding


def test_a_sparse_gradient_lists_only_rows_that_a_valid_index_asks_for(monkeypatch):
    monkeypatch.setattr(
        row_gradients, "_wrapper_for", None
    )  # as on bare records: no layer makes masked tensors of them
    known = torch.tensor([True, False, True])
    weight = torch.randn(9, 2, requires_grad=True)
    indices = Dense(torch.tensor([4, 77, 5]), flags(known))
    _, values = seen(apply(aten.embedding.default, Dense(weight), indices, sparse=True))
    (gradient,) = torch.autograd.grad(values.sum(), weight)
    assert gradient.is_sparse
    assert gradient.coalesce().indices().tolist() == [[4, 5]]
    assert gradient.coalesce().values().tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_rows_are_renormed_for_valid_indices_only():
    weight = torch.randn(4, 3) * 10
    indices = Dense(torch.tensor([1, 2, 99]), flags([True, False, False]))
    result = apply(aten.embedding_renorm.default, Dense(weight), indices, 1.0, 2.0)
    assert torch.equal(result.data[[0, 2, 3]], weight[[0, 2, 3]])
    torch.testing.assert_close(result.data[1].norm(), torch.tensor(1.0), atol=1e-4, rtol=0)
    nothing = apply(aten.embedding_renorm.default, Dense(weight), Dense(indices.data, flags([False] * 3)), 1.0, 2.0)
    assert torch.equal(nothing.data, weight)


def test_weights_of_a_bag_may_be_masked_and_offsets_may_not():
    weight = Dense(torch.tensor([[1.0], [10.0], [100.0]]))
    factors = Dense(torch.tensor([2.0, math.nan, 3.0]), flags([True, False, True]))
    indices, offsets = Dense(torch.tensor([0, 1, 2])), Dense(torch.tensor([0, 2]))
    result = apply(aten.embedding_bag.default, weight, indices, offsets, False, 0, False, factors)[0]
    assert seen(result)[1].tolist() == [[2.0], [300.0]]
    with pytest.raises(MaskedSemanticsError, match="offsets"):
        apply(aten.embedding_bag.default, weight, indices, Dense(offsets.data, flags([True, False])))


# ------------------------------------------------------------------------------------------------------------ pooling


def test_averages_by_hand():
    x = Dense(torch.tensor([[[2.0, math.nan, 6.0, math.nan, math.nan, 4.0]]]), flags([[[1, 0, 1, 0, 0, 1]]]))
    mask, values = seen(apply(aten.avg_pool1d.default, x, [2], [1]))
    assert mask.tolist() == [[[True, True, True, False, True]]]
    assert values.tolist() == [[[2.0, 6.0, 6.0, 0.0, 4.0]]]
    # Padding that is counted is always there: (0 + 2) / 2 at the left, (4 + 0) / 2 at the right.
    mask, values = seen(apply(aten.avg_pool1d.default, x, [2], [1], [1]))
    assert values.tolist() == [[[1.0, 2.0, 6.0, 6.0, 0.0, 4.0, 2.0]]]
    plane = Dense(x.data[:, :, None], x.validity[:, :, None])
    _, values = seen(apply(aten.avg_pool2d.default, plane, [1, 2], [1, 1], [0, 0], False, True, 4))
    assert values.tolist() == [[[[0.5, 1.5, 1.5, 0.0, 1.0]]]]


def test_what_is_nearest_by_hand():
    x = Dense(torch.tensor([[[2.0, math.nan, 6.0]]]), flags([[[1, 0, 1]]]))
    mask, values = seen(apply(aten.upsample_nearest1d.vec, x, None, [2.0]))
    assert mask.tolist() == [[[True, True, False, False, True, True]]]
    assert values.tolist() == [[[2.0, 2.0, 0.0, 0.0, 6.0, 6.0]]]
