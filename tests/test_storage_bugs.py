"""The bug zoo of storage: each was there once."""

from __future__ import annotations

import pytest
import torch

import masked_dispatch as md


@pytest.fixture
def x() -> md.MaskedTensor:
    return md.masked_tensor(torch.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool])
def test_bytes_are_filled_whole(dtype):
    z = md.masked_tensor(torch.tensor([50, 7, 3]).to(dtype), torch.tensor([True, True, False]))
    assert z.to_tensor(0).tolist() == torch.tensor([50, 7, 0]).to(dtype).tolist()


def test_grad_scaler_unscales_a_sparse_gradient():
    weight = torch.nn.Parameter(torch.ones(2, 3))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler("cpu", init_scale=1024.0)
    weight.grad = md.masked_tensor(torch.full((2, 3), 1024.0)).to_sparse_csr()
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    assert torch.equal(weight.detach(), torch.zeros(2, 3))


def test_a_write_to_what_was_detached_is_a_write_to_the_tensor(x):
    y = x.to_sparse_csr()
    y.data.clamp_(max=0.5)
    assert y.amax().item() == 0.5
    y.detach().zero_()
    assert y.amax().item() == 0
    kept = y.detach()
    y += 1
    assert kept.amax().item() == 1


def test_a_write_through_a_view_of_what_stands_for_a_view_is_refused(x):
    y = x.to_sparse(1)
    with pytest.raises(md.MaskedSemanticsError, match="would write through a view"):
        y[0, 1] = 9.0
    with pytest.raises(md.MaskedSemanticsError, match="would write through a view"):
        y[0][1].fill_(9.0)


@pytest.mark.parametrize("change", [lambda y: y.t_(), lambda y: y.unsqueeze_(0), lambda y: y.transpose_(0, 1)])
def test_a_change_of_shape_in_place_is_refused(x, change):
    with pytest.raises(md.MaskedSemanticsError, match=r"is stored as torch\.sparse_csr.* Use the form that returns"):
        change(x.to_sparse_csr())


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_gradients_of_a_broadcast_operand_are_not_summed_in_half_precision(layout):
    weight = torch.ones(2, 1, dtype=torch.bfloat16, requires_grad=True)
    ones = md.masked_tensor(torch.ones(2, 8192, dtype=torch.bfloat16))
    (ones.to_layout(layout) * weight).sum().to_tensor(0).backward()
    assert weight.grad.flatten().tolist() == [8192, 8192]


def test_half_precision_products_are_rounded_once():
    a = md.masked_tensor(torch.tensor([[300.0, -300.0]]).half()).to_sparse_csr()
    b = md.masked_tensor(torch.tensor([[300.0], [300.0]]).half())
    assert (a @ b.to_sparse_csr()).to_tensor(0).item() == 0
    plain, zero = torch.tensor([[300.0], [-300.0]]).half(), torch.zeros(1, 1).half()
    expected = torch.addmm(zero, a.to_tensor(0), plain, alpha=0.25)
    assert torch.equal(torch.addmm(zero, a, plain, alpha=0.25).to_tensor(0), expected)
    among = torch.addmm(md.masked_tensor(zero).to_sparse_csr(), a.to_tensor(0), plain, alpha=0.25)
    assert torch.equal(among.to_tensor(0), expected)


def test_a_choice_drops_no_mask(x):
    y = md.masked_tensor(torch.full((2, 3), torch.nan), torch.tensor([[True, False, True]]))
    assert torch.equal(md.storage.choose(x).of(y).get_mask(), y.get_mask())
    assert torch.equal(md.storage.choose(y, 1.0).of(y).get_mask(), y.get_mask())


def test_an_update_of_an_expanded_tensor_is_torchs_error(x):
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        torch.zeros(1, 3).expand(2, 3).add_(x.to_sparse_csr())


def test_other_dimensions_can_be_made_sparse(x):
    rows = x.to_sparse(1)
    assert rows.to_sparse_csr().storage_layout is torch.sparse_csr
    assert rows.to_sparse_bsr((1, 1)).nnz == 6
    assert md.masked_tensor(torch.ones(2, 3, 4)).to_sparse().to_sparse(1).nnz == 2
    with (
        md.densify("never"),
        pytest.raises(md.MaskedSemanticsError, match="1 of its dimensions are sparse, and"),
    ):
        rows.to_sparse_csr()


def test_producers_leave_something_out():
    with pytest.raises(ValueError, match=r"torch\.strided stores every element"):
        md.sparse_where(torch.ones(2, 2), torch.ones(2, 2) > 0, layout=torch.strided)


@pytest.mark.parametrize("target", ["plain", "masked", "sparse"])
def test_out_takes_what_sparse_storage_gives(x, target):
    mask = torch.tensor([[True, False, True]])
    s = md.masked_tensor(x.get_data(), mask.expand(2, 3)).to_sparse_csr()
    out = torch.full((2, 3), -1.0)
    if target != "plain":
        out = md.masked_tensor(out)
    out = out.to_sparse_csr() if target == "sparse" else out
    found, expected = torch.add(s, 1, out=out), s.to_dense() + 1
    assert found is out
    if target == "plain":
        assert torch.equal(out, expected.to_tensor(-1))  # an update: what is invalid writes nothing
    else:
        assert torch.equal(out.get_mask(), expected.get_mask())
        assert torch.equal(out.to_tensor(0), expected.to_tensor(0))


def test_adamax_takes_a_sparse_gradient():
    steps = []
    for layout in (torch.strided, torch.sparse_csr):
        weight = torch.nn.Parameter(torch.ones(2, 3))
        weight.grad = md.masked_tensor(torch.full((2, 3), 2.0)).to_layout(layout)
        torch.optim.Adamax([weight], lr=0.1).step()
        steps.append(weight.detach())
    torch.testing.assert_close(steps[1], steps[0])
