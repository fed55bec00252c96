"""Optimizers and masked gradients, however these are stored: what has no gradient keeps its value and its state."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import masked_dispatch as md

LAYOUTS = [torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc]
BLOCKS = (torch.sparse_bsr, torch.sparse_bsc)


def stored(x: md.MaskedTensor, layout: torch.layout, sparse_dim: int | None = None) -> md.MaskedTensor:
    blocks = {"blocksize": (2, 3)} if layout in BLOCKS else {}
    return x.to_layout(layout, sparse_dim=sparse_dim, **blocks)


def some_gradient(shape: tuple[int, ...], seed: int, by_row: bool = False) -> md.MaskedTensor:
    """Half of the elements (or of the rows) valid, NaN under the mask."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(shape[:1] + (1,) * (len(shape) - 1) if by_row else shape, generator=generator) < 0.5).expand(
        shape
    )
    return md.masked_tensor(torch.where(mask, torch.randn(shape, generator=generator), torch.nan), mask)


# ------------------------------------------------------------------------------------------------------- the tutorial


def adagrad(param: Tensor, grad: Tensor, state_sum: Tensor, lr: float = 0.1, eps: float = 1e-10) -> None:
    """PyTorch's tutorial on masked tensors wants to write Adagrad so: once, whatever the layout of the gradient."""
    state_sum += grad * grad
    std = md.mask_like(state_sum, grad).sqrt() + eps
    param -= lr * grad / std


def adagrad_by_hand(param: Tensor, grad: Tensor, state_sum: Tensor, lr: float = 0.1, eps: float = 1e-10) -> None:
    """What torch.optim.Adagrad has to do for gradients in torch's COO layout, and for no other."""
    grad = grad.coalesce()

    def make_sparse(values: Tensor) -> Tensor:
        return torch.sparse_coo_tensor(grad.indices(), values, grad.shape, check_invariants=True)

    state_sum.add_(make_sparse(grad.values().pow(2)))
    std = state_sum.sparse_mask(grad).values().sqrt().add_(eps)
    param.add_(make_sparse(grad.values() / std), alpha=-lr)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_tutorials_adagrad_is_one_function_for_six_layouts(layout):
    param, state = torch.ones(4, 6), torch.zeros(4, 6)
    expected, expected_state = param.clone(), state.clone()
    for seed in range(3):
        gradient = some_gradient((4, 6), seed)
        adagrad(param, stored(gradient, layout), state)
        places = gradient.get_mask().nonzero().t()
        values = gradient.get_data()[gradient.get_mask()]
        adagrad_by_hand(
            expected, torch.sparse_coo_tensor(places, values, (4, 6), check_invariants=True), expected_state
        )
    torch.testing.assert_close(param, expected)
    torch.testing.assert_close(state, expected_state)


# --------------------------------------------------------------------------------------------------- stock optimizers

STOCK = [
    (torch.optim.Adagrad, {}),
    (torch.optim.Adagrad, {"foreach": False, "lr_decay": 0.1, "weight_decay": 0.1, "maximize": True}),
    (torch.optim.Adagrad, {"foreach": True, "weight_decay": 0.1, "maximize": True}),
    (torch.optim.Adagrad, {"fused": True}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"foreach": False, "weight_decay": 0.1, "maximize": True}),
    (torch.optim.SGD, {"foreach": True, "weight_decay": 0.1}),
    (torch.optim.SGD, {"foreach": False, "momentum": 0.9}),
    (torch.optim.SGD, {"foreach": True, "momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"fused": True}),
]
IDS = [f"{cls.__name__}-{'-'.join(options) or 'plain'}" for cls, options in STOCK]
SHAPES = [((4, 6), None, False), ((2, 4, 6), None, False), ((4, 6, 3), 2, False), ((7, 3), 1, True)]


def trained(cls, options, layout, shape, sparse_dim, by_row):
    """A parameter and its states after three steps with gradients of other places each."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(shape))
    optimizer = cls([parameter], **{"lr": 0.1, **options})
    for seed in range(3):
        parameter.grad = stored(some_gradient(shape, seed, by_row), layout, sparse_dim)
        optimizer.step()
    states = {k: v for k, v in optimizer.state[parameter].items() if isinstance(v, Tensor)}
    return parameter.detach(), states


@pytest.mark.parametrize(("shape", "sparse_dim", "by_row"), SHAPES)
@pytest.mark.parametrize(("cls", "options"), STOCK, ids=IDS)
def test_stock_optimizers_do_not_see_how_a_gradient_is_stored(cls, options, shape, sparse_dim, by_row):
    expected, expected_states = trained(cls, options, torch.strided, shape, None, by_row)
    for layout in LAYOUTS[1:]:
        if sparse_dim == 1 and layout is not torch.sparse_coo:
            continue
        with md.densify("never"):
            parameter, states = trained(cls, options, layout, shape, sparse_dim, by_row)
        assert type(parameter) is Tensor
        torch.testing.assert_close(parameter, expected)
        for name, state in states.items():
            wanted = expected_states[name]
            if md.is_masked_tensor(state):
                assert torch.equal(state.get_mask(), wanted.get_mask())
                state, wanted = state.to_tensor(0), wanted.to_tensor(0)
            torch.testing.assert_close(state, wanted)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("cls", [torch.optim.Adagrad, torch.optim.SGD])
def test_what_has_no_gradient_keeps_its_value(cls, layout):
    parameter, gradient = nn.Parameter(torch.ones(4, 6)), some_gradient((4, 6), 0)
    optimizer = cls([parameter], lr=0.1)
    parameter.grad = stored(gradient.clone(), layout)
    optimizer.step()
    assert torch.equal(parameter != 1, gradient.get_mask())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_gradient_is_clipped_where_it_is(layout):
    parameter, gradient = nn.Parameter(torch.ones(4, 6)), some_gradient((4, 6), 0)
    parameter.grad = stored(gradient.clone(), layout)
    norm = nn.utils.clip_grad_norm_([parameter], 0.5)
    norm = norm.item() if isinstance(norm, Tensor) else norm
    assert norm == pytest.approx(gradient.to_tensor(0).norm().item())
    assert parameter.grad.storage_layout is layout
    assert parameter.grad.norm().item() == pytest.approx(0.5, rel=1e-4)
    assert torch.equal(parameter.grad.get_mask(), gradient.get_mask())


# ---------------------------------------------------------------------------------------------------------- mask_like


@pytest.mark.parametrize(("shape", "sparse_dim", "by_row"), SHAPES)
def test_mask_like_takes_what_lies_in_the_others_places(shape, sparse_dim, by_row):
    values = torch.randn(shape, requires_grad=True)
    other = some_gradient(shape, 0, by_row)
    for layout in LAYOUTS:
        if sparse_dim == 1 and layout not in (torch.strided, torch.sparse_coo):
            continue
        with md.densify("never"):
            taken = md.mask_like(values, stored(other, layout, sparse_dim))
        assert taken.storage_layout is layout
        assert torch.equal(taken.get_mask(), other.get_mask())
        assert torch.equal(taken.to_tensor(0), torch.where(other.get_mask(), values, 0))
        (gradient,) = torch.autograd.grad(taken.square().sum(), values)
        assert type(gradient) is Tensor
        torch.testing.assert_close(gradient, torch.where(other.get_mask(), 2 * values, 0).detach())


def test_mask_like_intersects_with_a_mask_of_the_tensors_own():
    x, other = some_gradient((4, 6), 1), some_gradient((4, 6), 0)
    for own in LAYOUTS:
        for layout in LAYOUTS:
            taken = stored(x, own).mask_like(stored(other, layout))
            assert torch.equal(taken.get_mask(), x.get_mask() & other.get_mask())
            assert taken.storage_layout is (own if layout is torch.strided else layout)


@pytest.mark.parametrize(
    ("other", "error", "message"),
    [
        (
            torch.ones(2),
            TypeError,
            "mask_like takes its places from a masked tensor, not from a Tensor; to",
        ),
        (
            md.masked_tensor(torch.ones(3)),
            ValueError,
            "`other` has shape (3,), which does not broadcast to the",
        ),
    ],
)
def test_what_mask_like_cannot_take(other, error, message):
    with pytest.raises(error, match=re.escape(message)):
        md.mask_like(torch.ones(2), other)
