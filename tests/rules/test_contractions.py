"""Contractions: empty ones, masks that stay small, the geometry of convolutions, einsum of dimensions of size 1.

That a result sums the index tuples whose factors are all valid, in every form of product, under every kind of mask and
with its gradients, the laws ask (P2, P3, P5).
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import masked_dispatch as md
from bare_records import apply, seen
from called_operators import Calls
from op_registry.authoring import Dense

aten = torch.ops.aten


def test_a_contraction_of_size_zero_is_zero_and_valid():
    x = Dense(torch.randn(3, 0), torch.zeros(3, 0, dtype=torch.int8))
    result = apply(aten.mm.default, x, Dense(torch.randn(0, 2)))
    assert result.validity is None
    assert torch.equal(result.data, torch.zeros(3, 2))


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        *(("addmm", ((3, 5), (3, 4), (4, 5))), ("addmv", ((3,), (3, 4), (4,))), ("addr", ((3, 5), (3,), (5,)))),
        *(("addbmm", ((3, 5), (2, 3, 4), (2, 4, 5))), ("baddbmm", ((2, 3, 5), (2, 3, 4), (2, 4, 5)))),
    ],
)
def test_what_is_added_takes_no_part_with_beta_0(name, shapes):
    own, a, b = map(torch.ones, shapes)
    nothing = md.masked_tensor(own * math.nan, torch.zeros_like(own, dtype=torch.bool))
    add = getattr(torch, name)
    assert torch.equal(add(nothing, a, b, beta=0).to_tensor(math.nan), add(own, a, b, beta=0))
    assert not add(nothing, a, b).get_mask().any()


def test_a_mask_by_token_stays_one():
    mask = (torch.rand(2, 3, 1) < 0.5).to(torch.int8)
    x = Dense(torch.randn(2, 3, 4), mask)
    assert apply(aten.linear.default, x, Dense(torch.randn(5, 4)), Dense(torch.randn(5))).validity is mask
    assert apply(aten.matmul.default, x, Dense(torch.randn(4, 5))).validity is mask


def test_linear_is_one_product_whose_mask_costs_none():
    x = Dense(torch.randn(6, 4), (torch.rand(6, 4) < 0.5).to(torch.int8))
    with Calls() as calls:
        apply(aten.linear.default, x, Dense(torch.randn(5, 4)), Dense(torch.randn(5)))
    names = [op._schema.name.removeprefix("aten::") for op in calls.seen]
    assert [n for n in names if "mm" in n] == ["addmm"]


# ------------------------------------------------------------------------------------------------------- convolution


def test_a_convolution_by_hand():
    x = Dense(
        torch.tensor([[[1.0, math.nan, 3.0, math.nan, math.nan, 6.0]]]),
        torch.tensor([[[1, 0, 1, 0, 0, 1]]], dtype=torch.int8),
    )
    weight = Dense(torch.tensor([[[1.0, 10.0]]]))
    result = apply(aten.conv1d.default, x, weight, Dense(torch.tensor([0.5])))
    mask, values = seen(result)
    assert mask.tolist() == [[[True, True, True, False, True]]]
    assert values.tolist() == [[[1.5, 30.5, 3.5, 0.0, 60.5]]]


def test_the_holes_of_a_strided_transpose_are_torchs_own():
    x = Dense(torch.tensor([[[2.0, math.nan]]]), torch.tensor([[[1, 0]]], dtype=torch.int8))
    mask, values = seen(apply(aten.conv_transpose1d.default, x, Dense(torch.ones(1, 1, 1)), None, [3]))
    assert mask.tolist() == [[[True, True, True, False]]]
    assert values.tolist() == [[[2.0, 0.0, 0.0, 0.0]]]


def test_a_window_of_padding_alone_is_torchs_own():
    x = Dense(torch.tensor([[[math.nan, 1.0]]]), torch.tensor([[[0, 1]]], dtype=torch.int8))
    mask, _ = seen(apply(aten.conv1d.default, x, Dense(torch.ones(1, 1, 2)), None, [1], [2]))
    assert mask.tolist() == [[[True, False, True, True, True]]]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
def test_padding_by_name_is_no_element():
    x = Dense(torch.tensor([[[math.nan, 1.0, 2.0]]]), torch.tensor([[[0, 1, 1]]], dtype=torch.int8))
    for op in (aten.conv1d.padding, aten._convolution_mode.default):
        mask, values = seen(apply(op, x, Dense(torch.ones(1, 1, 2)), None, [1], "same", [1], 1))
        assert mask.tolist() == [[[True, True, True]]]
        assert values.tolist() == [[[1.0, 3.0, 2.0]]]


def test_the_mask_of_a_convolution_stays_as_small_as_its_input_has_it():
    weight = Dense(torch.randn(8, 4, 3))
    by_position = Dense(torch.randn(2, 4, 7), torch.ones(2, 1, 7, dtype=torch.int8))
    assert apply(aten.conv1d.default, by_position, weight, Dense(torch.randn(8))).validity.shape == (2, 1, 5)
    full = Dense(torch.randn(2, 4, 7), torch.ones(2, 4, 7, dtype=torch.int8))
    assert apply(aten.conv1d.default, full, weight).validity.shape == (2, 1, 5)


# ----------------------------------------------------------------------------------------------------------- distances


def test_distances_without_a_common_coordinate_on_stored_invalid_elements() -> None:
    """NaN that is stored where it is invalid came back as the gradient of valid elements of other rows."""
    mask = torch.tensor([[True], [True], [False]])
    stored = md.masked_tensor(torch.tensor([[1.0], [4.0], [torch.nan]]), None).to_layout(torch.sparse_coo, sparse_dim=1)
    x = stored.mask_with(mask)
    x = x.detach().requires_grad_()
    F.pdist(x).sum().to_tensor(0).backward()
    assert x.grad is not None
    assert x.grad.to_tensor(0).flatten().tolist() == [-1, 1, 0]


# ------------------------------------------------------------------------------------------------------------- einsum


def test_a_dimension_of_size_one_meets_each_index_of_the_other() -> None:
    one = md.masked_tensor([[1.0, math.nan]], [[True, False]])
    rows = md.masked_tensor(
        [[2.0, 3.0], [math.nan, 5.0], [6.0, math.nan]], [[True, True], [False, True], [True, False]]
    )
    assert torch.einsum("ij,ij->i", one, rows).to_tensor(-1).tolist() == [2, -1, 6]


@pytest.mark.parametrize("equation", ["ij,jk->il", "ij,jk,kl->il", "ijk,jk->i", "ij,jk->ii", "ij,j", "i?,j->i"])
def test_errors_are_those_of_torch(equation: str) -> None:
    x = torch.ones(1, 2)
    with pytest.raises(RuntimeError) as torchs:
        torch.einsum(equation, x, torch.ones(3, 1))
    with pytest.raises(RuntimeError) as ours:
        torch.einsum(equation, md.as_masked_tensor(x, x > 0), torch.ones(3, 1))
    assert str(ours.value) == str(torchs.value)


def test_one_position_is_there_in_samples_that_have_it() -> None:
    one = md.from_lengths(torch.ones(3, 1, 4), torch.tensor([1, 0, 1]))
    others = md.from_lengths(torch.ones(3, 5, 4), torch.tensor([5, 2, 3]))
    scores = torch.einsum("btd,bsd->bts", one, others)
    assert scores.amax(2).extent.tolist() == [[True], [False], [True]]
    assert scores.sum(2).to_tensor(-1).tolist() == [[20], [-1], [12]]


@pytest.mark.parametrize("equation", ["bij->b", "bij,bij->b", "bij,bjk->bk"])
def test_einsum_of_integers_has_torchs_dtype_where_a_dimension_has_one_element(equation: str) -> None:
    x = torch.tensor([[[1, 2, 3]], [[4, 5, 6]]], dtype=torch.int32)
    operands = [x, x.mT if "bjk" in equation else x][: equation.count("b") - 1]
    plain = torch.einsum(equation, operands)
    found = torch.einsum(equation, [md.as_masked_tensor(t) for t in operands])
    assert (found.dtype, found.tolist()) == (plain.dtype, plain.tolist())
