"""Embedding, bags and pooling on bare records, against what torch gives for the valid elements alone."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from bare_records import apply, seen
from op_registry import MaskedSemanticsError
from op_registry.authoring import Dense
from op_registry.ops.windows.interpolation import NEEDS_ALL_VALID
from op_registry.sparse import lookup_gradient as row_gradients

aten = torch.ops.aten


def half(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5


def flags(mask):
    return torch.as_tensor(mask).to(torch.int8)


# ---------------------------------------------------------------------------------------------------------- embedding


@pytest.mark.parametrize("options", [{}, {"padding_idx": 0}, {"padding_idx": 2}, {"scale_grad_by_freq": True}], ids=str)
@pytest.mark.parametrize("garbage", [-(2**62), 2**62, 0, 1])
def test_an_invalid_index_is_not_looked_up_and_gives_no_gradient(options, garbage):
    known = torch.tensor([True, False, True, True, False])
    indices = torch.tensor([1, 0, 1, 0, 2])
    weight = torch.randn(3, 2, requires_grad=True)
    result = apply(
        aten.embedding.default, Dense(weight), Dense(torch.where(known, indices, garbage), flags(known)), **options
    )
    mask, values = seen(result)
    assert result.validity.shape == (5, 1)
    assert torch.equal(mask, known[:, None].expand(5, 2))
    (mine,) = torch.autograd.grad(values.sum(), weight)
    alone = aten.embedding(weight, indices[known], **options)
    assert torch.equal(values[known], alone)
    torch.testing.assert_close(mine, torch.autograd.grad(alone.sum(), weight)[0])


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


def test_a_masked_weight_moves_with_its_validity():
    known = half(4, 3)
    weight = Dense(torch.where(known, torch.randn(4, 3), math.nan), flags(known))
    mask, _ = seen(apply(aten.embedding.default, weight, Dense(torch.tensor([[1, 3], [0, 1]]))))
    assert torch.equal(mask, known[torch.tensor([[1, 3], [0, 1]])])
    by_row = Dense(weight.data, flags(half(4, 1)))
    assert apply(aten.embedding.default, by_row, Dense(torch.tensor([1, 3]))).validity.shape == (2, 1)


def test_rows_are_renormed_for_valid_indices_only():
    weight = torch.randn(4, 3) * 10
    indices = Dense(torch.tensor([1, 2, 99]), flags([True, False, False]))
    result = apply(aten.embedding_renorm.default, Dense(weight), indices, 1.0, 2.0)
    assert torch.equal(result.data[[0, 2, 3]], weight[[0, 2, 3]])
    torch.testing.assert_close(result.data[1].norm(), torch.tensor(1.0), atol=1e-4, rtol=0)
    nothing = apply(aten.embedding_renorm.default, Dense(weight), Dense(indices.data, flags([False] * 3)), 1.0, 2.0)
    assert torch.equal(nothing.data, weight)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_a_bag_is_of_its_valid_elements(mode, padding_idx):
    number = ("sum", "mean", "max").index(mode)
    weight = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([1, 2, 3, 4, 0, 3, 1])
    known = torch.tensor([True, False, True, False, False, True, True])
    offsets = torch.tensor([0, 3, 3, 5, 6])  # [1 . 3] [] [. .] [3] [1]
    given = Dense(torch.where(known, indices, 10**9), flags(known))
    result = apply(
        aten.embedding_bag.padding_idx,
        Dense(weight),
        given,
        Dense(offsets),
        False,
        number,
        False,
        None,
        False,
        padding_idx,
    )[0]
    mask, values = seen(result)
    assert mask.tolist() == [[True] * 2, [True] * 2, [False] * 2, [True] * 2, [True] * 2]
    kept = F.embedding_bag(indices[known], weight, torch.tensor([0, 2, 2, 2, 3]), mode=mode, padding_idx=padding_idx)
    torch.testing.assert_close(values, torch.where(mask, kept, 0))
    torch.testing.assert_close(
        torch.autograd.grad(values.square().sum(), weight)[0], torch.autograd.grad(kept.square().sum(), weight)[0]
    )


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


def test_adaptive_averages_and_maxima_by_hand():
    x = Dense(torch.tensor([[[-2.0, math.inf, -6.0, math.nan, math.nan]]]), flags([[[1, 0, 1, 0, 0]]]))
    mask, values = seen(apply(aten.adaptive_avg_pool1d.default, x, [2]))  # windows [0, 3) and [2, 5)
    assert mask.all()
    assert values.tolist() == [[[-4.0, -6.0]]]
    for result, places in (
        (apply(aten.adaptive_max_pool1d.default, x, [2]), [[[0, 2]]]),
        (apply(aten.max_pool1d_with_indices.default, x, [3], [2]), [[[0, 2]]]),
    ):
        assert seen(result[0])[1].tolist() == [[[-2.0, -6.0]]]
        assert seen(result[1])[1].tolist() == places
    mask, _ = seen(apply(aten.max_pool1d.default, x, [2], [1]))
    assert mask.tolist() == [[[True, True, True, False]]]


POOLS = [
    lambda x: apply(aten.avg_pool2d.default, x, [3, 2], [2, 2], [1, 1], True),
    lambda x: apply(aten.avg_pool2d.default, x, [2, 2], [1, 2], [0, 0]),
    lambda x: apply(aten.adaptive_avg_pool2d.default, x, [2, 3]),
    lambda x: apply(aten.max_pool2d_with_indices.default, x, [2, 2], [1, 1], [1, 1], [2, 1])[0],
]


@pytest.mark.parametrize("kind", ["full", "position", "sample", "empty"])
@pytest.mark.parametrize("number", range(len(POOLS)))
def test_hidden_values_change_nothing(number, kind):
    pool = POOLS[number]
    shape = {"full": (2, 3, 5, 6), "position": (2, 1, 5, 6), "sample": (2, 1, 1, 1), "empty": (2, 3, 5, 6)}[kind]
    mask = half(*shape) if kind != "empty" else torch.zeros(shape, dtype=torch.bool)
    x = torch.randn(2, 3, 5, 6, dtype=torch.float64)
    first = None
    for garbage in (math.nan, math.inf, -math.inf, 1e300, 0.0):
        leaf = torch.where(mask, x, garbage).requires_grad_()
        valid, values = seen(pool(Dense(leaf, flags(mask))))
        gradient = torch.where(mask, torch.autograd.grad(values.square().sum(), leaf)[0], 0)
        assert gradient.isfinite().all()
        again = [valid, values.detach(), gradient]
        first = first or again
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_mask_that_is_all_valid_averages_bit_for_bit():
    x = torch.randn(2, 3, 7, 7)
    for padding in (0, 1):
        mine = apply(
            aten.avg_pool2d.default,
            Dense(x, torch.ones(2, 1, 7, 7, dtype=torch.int8)),
            [3, 3],
            [2, 2],
            [padding] * 2,
            True,
        )
        assert torch.equal(mine.data, F.avg_pool2d(x, 3, 2, padding, True))
        assert mine.validity.shape == (2, 1, *mine.shape[2:])


def test_integer_averages_are_cut_off_as_torch_cuts_them():
    x = torch.randint(-50, 50, (1, 1, 8))
    mask = half(1, 1, 8, seed=2)
    valid, values = seen(apply(aten.avg_pool1d.default, Dense(torch.where(mask, x, 2**40), flags(mask)), [4], [1]))
    for o in range(5):
        kept = x[0, 0, o : o + 4][mask[0, 0, o : o + 4]]
        assert bool(valid[0, 0, o]) == bool(len(kept))
        if len(kept):
            assert values[0, 0, o] == torch.div(kept.sum(), len(kept), rounding_mode="trunc")


# ------------------------------------------------------------------------------------------------------ interpolation


def test_interpolation_by_hand():
    x = Dense(torch.tensor([[[2.0, math.nan, 6.0]]]), flags([[[1, 0, 1]]]))
    mask, values = seen(apply(aten.upsample_nearest1d.vec, x, None, [2.0]))
    assert mask.tolist() == [[[True, True, False, False, True, True]]]
    assert values.tolist() == [[[2.0, 2.0, 0.0, 0.0, 6.0, 6.0]]]
    # At 0, 0.5, 1, 1.5 and 2: halves of what is invalid are left out, and what is left weighs all.
    mask, values = seen(apply(aten.upsample_linear1d.default, x, [5], True))
    assert mask.tolist() == [[[True, True, False, True, True]]]
    assert values.tolist() == [[[2.0, 2.0, 0.0, 6.0, 6.0]]]


def test_bicubic_interpolation_needs_every_element_with_a_weight():
    known = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    known[..., 2, 3] = False
    x = Dense(torch.where(known, torch.randn(1, 1, 6, 6), math.nan), flags(known))
    for op in (packet.default for packet in NEEDS_ALL_VALID):
        mask, values = seen(apply(op, x, [12, 12], False))
        touched = op((~known).to(torch.float64), [12, 12], False).abs() > 1e-9
        assert torch.equal(mask, ~touched)
        plain = op(torch.where(known, x.data, 0), [12, 12], False)
        assert torch.equal(values, torch.where(mask, plain, 0))
