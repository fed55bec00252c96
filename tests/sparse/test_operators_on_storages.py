"""Operators on sparsely stored tensors, alone and with others: what was once wrong, and what P4 has no samples of."""

from __future__ import annotations

import contextlib
from itertools import cycle

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import masked_dispatch as md
from broadcasting_operators import faults
from masked_dispatch.testing import assert_close as alike
from storages import storages_but


@pytest.fixture
def x() -> md.MaskedTensor:
    return md.masked_tensor(torch.arange(6.0).reshape(2, 3))


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
    view = x.to_sparse(1)[0]
    with pytest.raises(md.MaskedSemanticsError, match="of a sparsely stored tensor; the view"):
        view.mul_(2)
    with pytest.raises(md.MaskedSemanticsError, match="would write through a view"):
        view[1].fill_(9.0)
    with pytest.raises(md.MaskedSemanticsError, match=r"Assign to the tensor itself, x\[index\] = value"):
        x.to_sparse_csr()[0] += 1


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


def test_an_update_of_an_expanded_tensor_is_torchs_error(x):
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        torch.zeros(1, 3).expand(2, 3).add_(x.to_sparse_csr())


def test_other_dimensions_can_be_made_sparse(x):
    rows = x.to_sparse(1)
    assert rows.to_sparse_csr().storage_layout is torch.sparse_csr
    assert rows.to_sparse_bsr((1, 1)).nnz == 6
    assert md.masked_tensor(torch.ones(2, 3, 4)).to_sparse().to_sparse(1).nnz == 2


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
    with pytest.warns(md.MaskDroppedWarning) if target == "plain" else contextlib.nullcontext():
        found, expected = torch.add(s, 1, out=out), s.to_dense() + 1
    assert found is out
    if target == "plain":
        assert torch.equal(out, expected.to_tensor(-1))  # an update: what is invalid writes nothing
    else:
        md.testing.assert_close(out, expected, rtol=0, atol=0)


STORED = storages_but("dense", "permuted")
NAMES = list(STORED)

PAIRS = {
    "products of pairs": lambda x: x[:, None] * x,
    "behind": lambda x: x[:, :, None] * x,
    "distances": lambda x: (x[:, None] - x).norm(dim=-1),
    "pairwise_distance": lambda x: torch.nn.functional.pairwise_distance(x[:, None], x),
    "where": lambda x: torch.where(x[:, None] > 0, x, x.exp()),
    "outer": lambda x: torch.outer(x[0], x[0].exp()),
    "column": lambda x: x[0].reshape(-1, 1) == x[0],
}


@pytest.mark.parametrize(
    "name, storage",
    [
        *zip(PAIRS, cycle(["coo", "hybrid", "csr", "bsc", "packed"]), strict=False),
        ("where", "coo"),
        ("where", "hybrid"),
    ],
)
def test_a_tensor_meets_itself_with_a_dimension_more(name, storage):
    """It has the pattern of what it meets, and yet other dimensions meet."""
    mask = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])
    x = md.masked_tensor(torch.arange(1.0, 10).reshape(3, 3), mask)
    mine, theirs = (t.detach().requires_grad_() for t in (STORED[storage](x), x))
    found, expected = PAIRS[name](mine), PAIRS[name](theirs)
    alike(found, expected)
    if found.requires_grad:
        found.sum().backward()
        expected.sum().backward()
        alike(mine.grad, theirs.grad, equal_nan=True)


def some(shape=(4, 6), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return md.masked_tensor(torch.randn(shape, generator=generator), torch.rand(shape, generator=generator) < 0.5)


@pytest.mark.parametrize("first, second", zip(NAMES, NAMES[1:] + NAMES[:1], strict=True))
def test_storages_that_have_different_dimensions_sparse_meet(first, second):
    x, y = STORED[first](some()), STORED[second](some(seed=1))
    dense = x.to_dense()
    alike(md.accumulate(x, y), md.accumulate(dense, y.to_dense()))
    alike(md.mask_like(x, y), md.mask_like(dense, y.to_dense()))
    alike(md.accumulate(x, y[:1]), md.accumulate(dense, y[:1].to_dense()))
    target = STORED[first](some())
    alike(target.copy_(y), y.to_dense())
    alike(torch.add(y, 1, out=target), y.to_dense() + 1)
    assert target.storage_layout is x.storage_layout


def test_accumulate_is_masked_where_one_operand_is():
    x = some().to_sparse_csr()
    assert isinstance(md.accumulate(x, torch.ones(4, 6)), md.MaskedTensor)
    with (
        md.densify("never"),
        pytest.raises(md.MaskedSemanticsError, match=r"accumulate has no sparse form .* broadcast"),
    ):
        md.accumulate(x, x[:1])


@pytest.mark.parametrize("name, dims", zip(STORED, cycle([1, 2, 3]), strict=False))
def test_any_number_of_dimensions_is_made_sparse_without_the_dense_tensor(name, dims):
    x = STORED[name](some((3, 4, 6))).requires_grad_()
    with md.densify("never"):
        found = x.to_sparse(sparse_dim=dims)
        alike(found, x.to_dense())
        found.pow(2).sum().backward()
    alike(x.grad, 2 * x.detach().to_dense())
    assert x.grad.storage_layout is x.storage_layout
    alike(x.detach().to_packed(), x.detach().to_dense())


REFUSED_BY_TORCH = {
    "topk": lambda x: x.topk(9),
    "kthvalue": lambda x: x.kthvalue(9),
    "sparse_topk": lambda x: md.sparse_topk(x, 9),
    "bmm": lambda x: torch.bmm(x, x.mT),
    "baddbmm": lambda x: torch.baddbmm(x @ x.mT, x, x.mT),
    "mm": lambda x: torch.mm(x[None], x.mT[None]),
    "addmm": lambda x: torch.addmm(torch.ones(4, 3), x[None], torch.ones(6, 3)),
    "nll_loss": lambda x: torch.nn.functional.nll_loss(x.long(), torch.zeros(4, dtype=torch.int64)),
    "cross_entropy": lambda x: torch.nn.functional.cross_entropy(x.long(), torch.zeros(4, dtype=torch.int64)),
    "glu": lambda x: torch.nn.functional.glu(x.long()),
    "trace": lambda x: (x > 0).trace(),
    "logcumsumexp": lambda x: x.to(torch.int8).logcumsumexp(0),
}


@pytest.mark.parametrize("name", REFUSED_BY_TORCH)
def test_what_torch_refuses_is_refused_in_every_storage(name):
    stored = some().to_sparse_csr()
    for x in (stored.to_tensor(0), stored.to_dense(), stored):
        with pytest.raises((RuntimeError, NotImplementedError, IndexError)):
            REFUSED_BY_TORCH[name](x)


@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_csr], ids=str)
def test_torch_s_sparse_tensors_as_plain_operands(layout):
    """They are valid everywhere, and 0 where they specify nothing, as any plain operand."""
    x = some().to_layout(layout)
    alike(x + torch.eye(4, 6).to_sparse(), x.to_dense() + torch.eye(4, 6))
    alike(x @ torch.eye(6).to_sparse(), x.to_dense() @ torch.eye(6))


@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_csr], ids=str)
def test_recording_transforms_are_refused(layout):
    """make_fx and torch.func.linearize would record what is stored as constants."""
    x = some().to_layout(layout)
    with pytest.raises(md.MaskedSemanticsError, match="make_fx is given a masked tensor"):
        make_fx(lambda x: x.exp().sum())(x)
    for function, argument in ((lambda x: x.pow(2).sum(), x), (lambda w: (x * w).sum(), torch.ones(4, 6))):
        with pytest.raises(md.MaskedSemanticsError, match=r"Use masked_dispatch\.functional\.jvp"):
            torch.func.linearize(function, argument)


def test_messages():
    x = some().to_sparse_csr()
    with pytest.raises(TypeError, match="sparse_where takes a tensor as x, not a float"):
        md.sparse_where(3.0, x.to_dense() > 0)
    for blocksize in (5, (5, 7, 1)):
        with pytest.raises(ValueError, match=r"a blocksize is \(rows, columns\), not"):
            x.to_sparse_bsr(blocksize)
    with pytest.raises(md.MaskedSemanticsError, match=r"from_lengths\(data\.to_padded_tensor\(0\), lengths\)"):
        md.as_masked_tensor(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged))
    with pytest.raises(RuntimeError, match=r"this one returned a masked tensor of shape \(4, 6\)"):
        md.functional.grad(lambda x: x * 2)(x)


def test_a_number_is_formatted_as_a_plain_one_is():
    x = md.masked_tensor(torch.tensor([1.25, 2.0]), torch.tensor([True, False]))
    assert f"{x.sum():.3f} {x[1]:.3f}" == "1.250 --"
    with pytest.raises(TypeError, match="unsupported format string"):
        f"{x:.3f}"


@pytest.mark.parametrize("norm", [torch.nn.functional.layer_norm, torch.nn.functional.rms_norm])
def test_a_sparse_weight_of_a_norm_under_autocast(norm):
    x = md.masked_tensor(torch.randn(2, 3), torch.tensor([[True, True, False], [False, True, True]]))
    weight = md.masked_tensor(torch.randn(3), torch.tensor([True, True, False]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sparse, dense = norm(x.to_sparse(), (3,), weight.to_sparse()), norm(x, (3,), weight)
    alike(sparse, dense)


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that an operator returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if type(result) is torch.Tensor:
            self.elements = max(self.elements, result.numel())
        return result


ROWS = torch.tensor([5, 3])
WRITES = {
    "index_copy_": lambda y: y.index_copy_(1, ROWS, y.narrow(1, 7, 2)),
    "index_add_": lambda y: y.index_add_(1, ROWS, y.narrow(1, 7, 2)),
    "scatter_": lambda y: y.scatter_(1, torch.zeros(4, 1, dtype=torch.int64), y.narrow(1, 7, 1)),
    "index_put_": lambda y: y.index_put_((torch.tensor([1]), torch.tensor([6])), torch.tensor(3.0)),
    "put_": lambda y: y.put_(torch.tensor([1, 900]), torch.tensor([3.0, 4.0])),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_to_dense_dimensions_takes_memory_for_its_rows_alone(write):
    """Each element was made a row of the dense dimensions first: memory quadratic in them."""
    data = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    dense = md.masked_tensor(data, data > -1)
    stored = dense.to_sparse(1)
    with LargestTensor() as largest:
        WRITES[write](stored)
    assert largest.elements <= 2 * dense.numel()
    expected = WRITES[write](dense.clone())
    alike(stored, expected, rtol=0, atol=0)


@pytest.mark.parametrize("op", [torch.ops.aten.where.self, torch.ops.aten.mul.Tensor], ids=str)
def test_a_hybrid_operand_broadcasts_as_any_other(op):
    """All broadcasting operators: tests/thorough/sparse/test_sparse_in_graphs.py."""
    assert not [fault for fault in faults(op, [(4,), (2, 1, 4), (1, 2, 1, 2, 1)]) if fault]


def test_no_element_is_taken_from_sparse_storage(x):
    with md.densify("never"):
        taken = x.to_sparse_csr().take(torch.empty(0, dtype=torch.int64))
    assert taken.shape == (0,)


@pytest.mark.parametrize("layout", ["dense", "csr"])
def test_weights_of_a_histogram_have_its_shape(layout):
    x = md.masked_tensor(torch.rand(3, 4), torch.rand(3, 4) > 0.3)
    with pytest.raises(RuntimeError, match=r"weight tensor .* should have the same shape"):
        torch.histogram(x if layout == "dense" else x.to_sparse_csr(), 4, weight=torch.ones(1, 4))


# ------------------------------------------------------------------- the same answers, and nothing is stored densely

CONDITION = torch.arange(24).view(4, 6) % 3 == 1
LABELS = torch.tensor([0, 5, 2, -100])

# What torch's database has no sample of (conformance asks the rest under P4), in one storage each.
CASES = {
    "where imputes": ("coo", lambda x, y: torch.where(CONDITION, x, 0.0)),
    "masked_select, sparse mask": ("csr", lambda x, y: x.masked_select(y > 0)),
    "x[i]": ("csr", lambda x, y: x[torch.tensor([3, -1, 0])]),
    "x[:, i]": ("csc", lambda x, y: x[:, torch.tensor([[3, 5], [0, 0]])]),
    "x[i, j]": ("bsr", lambda x, y: x[torch.tensor([3, 0]), torch.tensor([-1, 2])]),
    "x[m]": ("bsc", lambda x, y: x[CONDITION]),
    "index_select, masked index": (
        "coo",
        lambda x, y: x.index_select(0, md.masked_tensor(torch.tensor([3, 99, 0]), torch.tensor([True, False, True]))),
    ),
    "torch.masked.mean": ("bsr", lambda x, y: torch.masked.mean(x, 1, mask=CONDITION)),
}


@pytest.mark.parametrize(("storage", "function"), CASES.values(), ids=CASES)
def test_values_masks_and_gradients_as_on_dense_storage(storage, function):
    results, gradients = [], []
    for make in (lambda t: t, STORED[storage]):
        x, y = make(some()).requires_grad_(), make(some(seed=8)).requires_grad_()
        with md.densify("never"):
            results.append(function(x, y))
        (results[-1] * torch.arange(1, results[-1].numel() + 1).reshape(results[-1].shape)).sum().backward()
        gradients.append((x.grad, y.grad))
    alike(*results)
    for mine, theirs in zip(*gradients, strict=True):
        if mine is None or theirs is None:
            assert not any(g.to_tensor(0).any() for g in (mine, theirs) if g is not None)
        else:
            alike(mine, theirs)


def test_an_index_out_of_range_is_torchs_error():
    x = some().to_sparse_csr()
    for call in (
        lambda: x.gather(1, torch.full((4, 6), 6)),
        lambda: x.take(torch.tensor([24])),
        lambda: x[torch.tensor([4])],
        lambda: x.index_add(0, torch.tensor([4]), some((1, 6))),
        lambda: torch.nn.functional.nll_loss(x, torch.tensor([0, 6, 0, 0])),
    ):
        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
            call()


def test_a_dense_branch_is_not_grown_beyond_what_is_there():
    x = some().to_sparse_csr()
    with md.densify("never"), pytest.raises(md.MaskedSemanticsError, match="larger than any dense operand"):
        torch.where(torch.tensor([[True]] * 4), x, 0.0)
