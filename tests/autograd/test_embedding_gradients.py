"""Gradients of tables that were looked up sparsely: masked, stored as the rows that a valid look-up asked for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import masked_dispatch as md
from op_registry.sparse.coordinates import merge_duplicates, sort_indices

ROWS, WIDTH = 9, 4
INDICES = torch.tensor([[1, 3, 3], [7, 1, 5]])
KNOWN = torch.tensor([[True, True, False], [True, True, False]])


def holey(indices: Tensor = INDICES, known: Tensor = KNOWN, garbage: int = 10**12) -> md.MaskedTensor:
    """Indices whose invalid elements are no rows at all."""
    return md.masked_tensor(torch.where(known, indices, garbage), known)


def table(dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def weights(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


def listed(gradient: Tensor) -> list[int]:
    """The rows that are stored, all of whose elements have to be valid."""
    assert md.is_masked_tensor(gradient)
    assert gradient.storage_layout is torch.sparse_coo
    rows = gradient.get_mask()
    assert torch.equal(rows.any(1), rows.all(1))
    found = rows.any(1).nonzero()[:, 0].tolist()
    assert gradient.nnz == len(found)
    return found


def check(gradient: Tensor, expected: Tensor, rows: list[int]) -> None:
    assert listed(gradient) == rows
    torch.testing.assert_close(gradient.to_tensor(0), expected)


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({}, [1, 3, 7]),
        ({"padding_idx": 3}, [1, 7]),
        ({"scale_grad_by_freq": True}, [1, 3, 7]),
        ({"max_norm": 0.5}, [1, 3, 7]),
    ],
    ids=str,
)
def test_the_rows_of_valid_look_ups_are_there_and_duplicates_accumulate(options, rows):
    """With `max_norm`, rows are renormalised before they are looked up."""
    weight, dense = table(), table()
    factor = weights((2, 3, WIDTH))
    (F.embedding(holey(), weight, sparse=True, **options) * factor).sum().backward()
    (F.embedding(INDICES[KNOWN], dense, **options) * factor[KNOWN]).sum().backward()
    assert torch.equal(weight, dense)
    check(weight.grad, dense.grad, rows)


OFFSETS = torch.tensor([0, 2, 3])


@pytest.mark.parametrize("padding_idx", [None, 1])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags(mode, padding_idx):
    weight, dense = table(), table()
    factor = weights((3, WIDTH))
    known, given = KNOWN.reshape(-1), {"mode": mode, "padding_idx": padding_idx}
    bags = F.embedding_bag(holey().reshape(-1), weight, OFFSETS, sparse=True, **given)
    (bags * factor).sum().backward()
    kept = F.embedding_bag(INDICES.reshape(-1)[known], dense, torch.tensor([0, 2, 2]), **given)
    (kept * factor)[[0, 2]].sum().backward()  # the bag between has nothing valid
    check(weight.grad, dense.grad, [1, 3, 7] if padding_idx is None else [3, 7])


def test_a_bag_whose_sample_weights_are_masked():
    """A look-up whose own weight is invalid contributes nothing, and asks for no row."""
    weight, dense = table(), table()
    factors, counted = weights((6,)), torch.tensor([True, False, True, True, True, True])
    given = md.masked_tensor(torch.where(counted, factors, torch.nan), counted).requires_grad_()
    options = {"sparse": True, "mode": "sum", "per_sample_weights": given}
    F.embedding_bag(INDICES.reshape(-1), weight, OFFSETS, **options).sum().backward()
    (F.embedding(INDICES.reshape(-1)[counted], dense) * factors[counted].unsqueeze(1)).sum().backward()
    check(weight.grad, dense.grad, [1, 3, 5, 7])
    assert torch.equal(given.grad.get_mask(), counted)


def test_indices_that_are_all_valid_make_the_same_kind_of_gradient():
    weight, dense = table(), table()
    whole = md.masked_tensor(INDICES)
    for bag in (False, True):
        weight.grad = dense.grad = None
        if bag:
            F.embedding_bag(whole, weight, sparse=True).square().sum().backward()
            F.embedding_bag(INDICES, dense).square().sum().backward()
        else:
            F.embedding(whole, weight, sparse=True).square().sum().backward()
            F.embedding(INDICES, dense).square().sum().backward()
        check(weight.grad, dense.grad, [1, 3, 5, 7])


def test_nothing_valid_gives_a_gradient_of_no_rows():
    weight = table()
    (F.embedding(holey(known=torch.zeros(2, 3, dtype=torch.bool)), weight, sparse=True).sum()).backward()
    check(weight.grad, torch.zeros_like(weight), [])


def test_plain_indices_give_torchs_own_gradient():
    weight = table()
    F.embedding(INDICES, weight, sparse=True).sum().backward()
    assert weight.grad.is_sparse
    assert not md.is_masked_tensor(weight.grad)


# ---------------------------------------------------------------------------------------------------- several batches


def test_several_backward_calls_unite():
    weight, dense = table(), table()
    for indices in (INDICES, INDICES + 1):
        F.embedding(holey(indices), weight, sparse=True).square().sum().backward()
        F.embedding(indices[KNOWN], dense).square().sum().backward()
    check(weight.grad, dense.grad, [1, 2, 3, 4, 7, 8])


@pytest.mark.parametrize("order", ["masked first", "plain first", "in one graph"])
def test_a_batch_with_plain_indices_unites_with_one_without(order):
    weight, dense, others = table(), table(), torch.tensor([5, 5, 1])
    losses = [
        lambda: F.embedding(holey(), weight, sparse=True).square().sum(),
        lambda: F.embedding(others, weight, sparse=True).square().sum(),
    ]
    if order == "in one graph":
        (losses[0]() + losses[1]()).backward()
    else:
        for loss in losses if order == "masked first" else losses[::-1]:
            loss().backward()
    (F.embedding(INDICES[KNOWN], dense).square().sum() + F.embedding(others, dense).square().sum()).backward()
    check(weight.grad, dense.grad, [1, 3, 5, 7])


def test_a_use_of_the_whole_table_makes_its_gradient_plain():
    weight, dense = table(), table()
    (F.embedding(holey(), weight, sparse=True).sum() + weight.square().sum()).backward()
    (F.embedding(INDICES[KNOWN], dense).sum() + dense.square().sum()).backward()
    assert type(weight.grad) is Tensor
    torch.testing.assert_close(weight.grad, dense.grad)


def test_zero_grad():
    weight = table()
    optimizer = torch.optim.Adagrad([weight], lr=0.1)
    F.embedding(holey(), weight, sparse=True).sum().backward()
    optimizer.zero_grad()
    assert weight.grad is None
    F.embedding(holey(), weight, sparse=True).sum().backward()
    optimizer.zero_grad(set_to_none=False)  # an assignment: valid zeros everywhere
    assert weight.grad.get_mask().all()
    F.embedding(holey(), weight, sparse=True).sum().backward()
    assert weight.grad.to_tensor(-1).count_nonzero(1).tolist() == [0, 4, 0, 4, 0, 0, 0, 4, 0]


def test_clipping_leaves_the_rows_as_they_are():
    weight = table()
    F.embedding(holey(), weight, sparse=True).square().sum().backward()
    norm = weight.grad.to_tensor(0).norm().item()
    assert float(nn.utils.clip_grad_norm_([weight], 0.5)) == pytest.approx(norm)
    assert listed(weight.grad) == [1, 3, 7]
    assert weight.grad.to_tensor(0).norm().item() == pytest.approx(0.5, rel=1e-4)


# --------------------------------------------------------------------------------------------------------- derivatives


def test_the_second_derivative():
    weight, dense = table(), table()
    first = torch.autograd.grad(F.embedding(holey(), weight, sparse=True).pow(3).sum(), weight, create_graph=True)[0]
    (second,) = torch.autograd.grad(first.square().sum(), weight)
    plain = torch.autograd.grad(F.embedding(INDICES[KNOWN], dense).pow(3).sum(), dense, create_graph=True)[0]
    check(second, torch.autograd.grad(plain.square().sum(), dense)[0], [1, 3, 7])


def test_a_table_that_is_computed():
    """Between the table and the leaf, the gradient goes on through plain formulas."""
    weight, dense = table(), table()
    F.embedding(holey(), weight * 2, sparse=True).square().sum().backward()
    F.embedding(INDICES[KNOWN], dense * 2).square().sum().backward()
    check(weight.grad, dense.grad, [1, 3, 7])


def test_half_precision_is_summed_in_float32_and_rounded_once():
    weight = torch.zeros(3, 1, dtype=torch.bfloat16, requires_grad=True)
    indices = md.masked_tensor(torch.ones(1001, dtype=torch.int64), torch.arange(1001) != 500)
    F.embedding(indices, weight, sparse=True).sum().backward()
    assert listed(weight.grad) == [1]
    assert weight.grad.to_tensor(0)[1].item() == torch.tensor(1000.0).bfloat16().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.bool, torch.complex64])
@pytest.mark.parametrize("rest", [(), (3,), (2, 3), (0,)])
def test_merging_is_index_add_of_what_counts(rest, dtype):
    index = torch.tensor([4, 1, 4, 0, 1, 4])
    counted = torch.tensor([True, True, False, False, True, True])
    values = (torch.arange(6 * torch.Size(rest).numel()).reshape(6, *rest) % 5).to(dtype)
    rows, total = merge_duplicates(index, values, counted)
    assert rows.tolist() == [1, 4]
    wide = torch.int64 if dtype is torch.bool else dtype
    expected = torch.zeros((5, *rest), dtype=wide).index_add(0, index[counted], values[counted].to(wide))
    torch.testing.assert_close(total, expected[rows].to(dtype))


@pytest.mark.parametrize("number", [0, 5, 10_000, 40_000])
@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("highest", [50, 2**40])
def test_indices_are_sorted_stably_by_whatever_sort_is_quickest(highest, some, number):
    generator = torch.Generator().manual_seed(number)
    index = torch.randint(0, highest, (number,), generator=generator)
    counted = torch.rand(number, generator=generator) < 0.5 if some else None
    ordered, order = sort_indices(index if counted is None else torch.where(counted, index, 2**62), counted)
    kept = torch.arange(number) if counted is None else counted.nonzero()[:, 0]
    expected, places = index[kept].sort(stable=True)
    assert torch.equal(ordered.long(), expected)
    assert torch.equal(order, kept[places])
