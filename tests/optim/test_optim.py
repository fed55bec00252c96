"""Optimizers and masked gradients, however these are stored: what has no gradient keeps its value and its state."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import Tensor, nn

import masked_dispatch as md

# torch says so of its own sparse tensors, once in a process.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
    pytest.mark.filterwarnings("ignore:SGD steps a plain parameter"),  # test_stock_table.py
]

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


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_tutorials_adagrad_is_one_function_for_six_layouts(layout):
    """torch.optim.Adagrad has a formula of its own for gradients in torch's COO layout, and for no other."""
    param, state = torch.ones(4, 6), torch.zeros(4, 6)
    theirs = nn.Parameter(param.clone())
    optimizer = torch.optim.Adagrad([theirs], lr=0.1)
    for seed in range(3):
        gradient = some_gradient((4, 6), seed)
        adagrad(param, stored(gradient, layout), state)
        theirs.grad = gradient.to_torch_sparse(layout=torch.sparse_coo)
        optimizer.step()
    torch.testing.assert_close(param, theirs.detach())
    torch.testing.assert_close(state, optimizer.state[theirs]["sum"])


# --------------------------------------------------------------------------------------------------- stock optimizers

# Of matrices, and of gradients in COO and CSR, test_stock_table.py asks the other optimizers and options.
STOCK = [
    (torch.optim.Adagrad, {"foreach": False, "lr_decay": 0.1, "weight_decay": 0.1, "maximize": True}),
    (torch.optim.Adagrad, {"fused": True}),
    (torch.optim.SGD, {"foreach": True, "momentum": 0.9, "nesterov": True}),
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
            "mask_like takes its mask from a masked tensor, not from a Tensor; to",
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


# ------------------------------------------------------------------------------------------------------ lazy optimizers

OWN = [
    (md.optim.Adagrad, torch.optim.Adagrad, {}),
    (md.optim.Adagrad, torch.optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1, "maximize": True}),
    (md.optim.Adagrad, torch.optim.Adagrad, {"initial_accumulator_value": 0.5, "foreach": True}),
    (md.optim.Adagrad, torch.optim.Adagrad, {"fused": True}),
    (md.optim.SGD, torch.optim.SGD, {}),
    (md.optim.SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (md.optim.SGD, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3, "maximize": True}),
    (md.optim.LazyAdam, torch.optim.Adam, {}),
    (md.optim.LazyAdam, torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1, "maximize": True}),
    (md.optim.LazyAdam, torch.optim.Adam, {"decoupled_weight_decay": True, "weight_decay": 0.1, "foreach": True}),
    (md.optim.LazyAdam, torch.optim.Adam, {"fused": True}),
    (md.optim.AdamW, torch.optim.AdamW, {"amsgrad": True}),
    (md.optim.NAdam, torch.optim.NAdam, {"weight_decay": 0.1, "foreach": False}),
    (md.optim.NAdam, torch.optim.NAdam, {"foreach": True, "decoupled_weight_decay": True}),
    (md.optim.RAdam, torch.optim.RAdam, {"weight_decay": 0.1}),
    (md.optim.Adamax, torch.optim.Adamax, {}),
    (md.optim.Adamax, torch.optim.Adamax, {"foreach": True, "weight_decay": 0.1, "maximize": True}),
    (md.optim.RMSprop, torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (md.optim.Adadelta, torch.optim.Adadelta, {"weight_decay": 0.1, "maximize": True}),
    (md.optim.Rprop, torch.optim.Rprop, {}),
    (md.optim.Rprop, torch.optim.Rprop, {"foreach": True, "maximize": True}),
]
OWN_IDS = [f"{own.__name__}-{'-'.join(options) or 'plain'}" for own, _, options in OWN]


def plainly(cls, options, gradients):
    """Each element by itself, by torch's own optimizer, for the steps in which it has a gradient.

    A step in which it has none is one with the gradient 0 whose effects on the element and its state are taken back.
    """
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(gradients[0].shape))
    optimizer = cls([parameter], **{"lr": 0.1, **options})
    for gradient in gradients:
        mask, before = gradient.get_mask(), parameter.detach().clone()
        states = {k: v.clone() for k, v in optimizer.state[parameter].items() if isinstance(v, Tensor)}
        parameter.grad = gradient.to_tensor(0)
        optimizer.step()
        with torch.no_grad():
            parameter.copy_(torch.where(mask, parameter, before))
            for name, state in optimizer.state[parameter].items():
                if state.shape == parameter.shape:
                    start = torch.full((), 0.1 if name == "step_size" else 0.0)  # Rprop's steps start at lr
                    state.copy_(torch.where(mask, state, states.get(name, start)))
    return parameter.detach(), optimizer.state[parameter]


@pytest.mark.parametrize(("shape", "sparse_dim", "by_row"), SHAPES)
@pytest.mark.parametrize(("own", "stock", "options"), OWN, ids=OWN_IDS)
def test_state_moves_only_where_there_is_a_gradient(own, stock, options, shape, sparse_dim, by_row):
    gradients = [some_gradient(shape, seed, by_row) for seed in range(3)]
    expected, expected_state = plainly(stock, options, gradients)
    for layout in LAYOUTS:
        if sparse_dim == 1 and layout not in (torch.strided, torch.sparse_coo):
            continue
        with md.densify("never"):
            parameter, state = trained(own, options, layout, shape, sparse_dim, by_row)
        torch.testing.assert_close(parameter, expected)
        assert state.keys() == {k for k, v in expected_state.items() if isinstance(v, Tensor)}
        for name, value in state.items():
            assert type(value) is Tensor
            torch.testing.assert_close(value, expected_state[name])


def look_ups():
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        yield torch.randint(0, 50, (40,), generator=generator), torch.rand(40, generator=generator) < 0.7


def looked_up(optimizer_of, gradient: str):
    """A table after three steps, with gradients that are masked, torch's own sparse ones, or both in one table."""
    torch.manual_seed(0)
    table = nn.Parameter(torch.randn(50, 4))
    optimizer = optimizer_of(table)
    for indices, known in look_ups():
        optimizer.zero_grad()
        if gradient == "masked":
            found = nn.functional.embedding(md.masked_tensor(indices, known), table, sparse=True)
        else:
            found = nn.functional.embedding(indices[known], table, sparse=True)
        found.pow(3).sum().backward()
        optimizer.step()
    return table.detach()


@pytest.mark.parametrize("gradient", ["masked", "torch's own"])
@pytest.mark.parametrize(
    ("own", "stock"),
    [
        (lambda p: md.optim.Adagrad([p], lr=0.1), lambda p: torch.optim.Adagrad([p], lr=0.1)),
        (lambda p: torch.optim.Adagrad([p], lr=0.1), lambda p: torch.optim.Adagrad([p], lr=0.1)),
        (lambda p: md.optim.SGD([p], lr=0.01), lambda p: torch.optim.SGD([p], lr=0.01)),
        (lambda p: md.optim.LazyAdam([p], lr=0.1, eps=1e-15), lambda p: torch.optim.SparseAdam([p], lr=0.1, eps=1e-15)),
    ],
    ids=["Adagrad", "stock-Adagrad", "SGD", "LazyAdam-SparseAdam"],
)
def test_tables_train_as_with_torchs_sparse_gradients(own, stock, gradient):
    torch.testing.assert_close(looked_up(own, gradient), looked_up(stock, "torch's own"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("own", "stock", "options"), OWN, ids=OWN_IDS)
def test_a_model_of_a_masked_table_and_plain_layers_trains(own, stock, options):
    torch.manual_seed(0)
    table, head = nn.Embedding(20, 4, sparse=True), nn.Linear(4, 1)
    optimizer = own([{"params": table.parameters()}, {"params": head.parameters(), "lr": 0.02}], lr=0.05, **options)
    indices, known = torch.randint(0, 20, (16,)), torch.rand(16) < 0.8
    sign = -1 if options.get("maximize") else 1
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = (head(table(md.masked_tensor(indices, known))) - 1).square().mean()
        (sign * loss).backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert {id(p) for p in optimizer.state} <= {id(p) for p in (table.weight, head.weight, head.bias)}


@pytest.mark.parametrize(("own", "stock", "options"), OWN, ids=OWN_IDS)
def test_states_are_torchs(own, stock, options):
    """A state dict goes from one to the other and back."""
    gradients = [some_gradient((4, 6), seed) for seed in range(2)]
    parameter = nn.Parameter(torch.ones(4, 6))
    first = own([parameter], lr=0.1, **options)
    parameter.grad = gradients[0].to_sparse()
    first.step()
    other = nn.Parameter(parameter.detach().clone())
    theirs = stock([other], lr=0.1, **options)
    theirs.load_state_dict(copy.deepcopy(first.state_dict()))
    again = own([other], lr=0.1, **options)
    again.load_state_dict(theirs.state_dict())
    for p, optimizer in ((parameter, first), (other, again)):
        p.grad = gradients[1].to_sparse()
        optimizer.step()
    assert torch.equal(parameter, other)


def test_closures_hooks_and_refusals():
    parameter, calls = nn.Parameter(torch.ones(4, 6)), []
    torch.optim.Adagrad([parameter])  # torch now wraps its own step
    optimizer = md.optim.Adagrad([parameter], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure():
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        parameter.grad = some_gradient((4, 6), 0).to_sparse()
        return loss

    assert optimizer.step(closure).item() == 24
    assert calls == ["before", "after"]
    for cls in {own for own, _, _ in OWN}:
        with pytest.raises(
            ValueError, match=f"{cls.__name__} writes into its parameters and does not support differentiable"
        ):
            cls([parameter], differentiable=True)


def test_a_step_that_fails_leaves_the_optimizer_as_it_was():
    parameter = nn.Parameter(torch.ones(4, 6))
    optimizer = md.optim.LazyAdam([parameter], lr=torch.tensor(0.1), foreach=None)
    optimizer.param_groups[0]["foreach"] = True  # which torch refuses for such an lr
    parameter.grad = some_gradient((4, 6), 0).to_sparse()
    with pytest.raises(RuntimeError, match="lr as a Tensor is not supported"):
        optimizer.step()
    assert optimizer.param_groups[0]["params"][0] is parameter
    assert all(p is parameter for p in optimizer.state)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_zero_grad_to_zero_leaves_a_gradient_of_nothing(layout):
    parameter = nn.Parameter(torch.ones(4, 6))
    parameter.grad = stored(some_gradient((4, 6), 0), layout)
    optimizer = md.optim.Adagrad([parameter], lr=0.1)
    optimizer.zero_grad(set_to_none=False)
    assert parameter.grad.storage_layout is layout
    assert parameter.grad.count() == 0
    optimizer.step()
    assert torch.equal(parameter, torch.ones(4, 6))
    total = md.accumulate(parameter.grad, stored(some_gradient((4, 6), 1), layout))
    assert torch.equal(total.get_mask(), some_gradient((4, 6), 1).get_mask())


def test_masked_parameters_take_torchs_step():
    parameters = [nn.Parameter(some_gradient((4, 6), 0)) for _ in range(2)]
    for cls, parameter in zip((md.optim.LazyAdam, torch.optim.Adam), parameters, strict=True):
        optimizer = cls([parameter], lr=0.1)
        parameter.square().sum().backward()
        optimizer.step()
    assert torch.equal(parameters[0].to_tensor(0), parameters[1].to_tensor(0))


@pytest.mark.parametrize(
    "cls", [md.optim.Adagrad, md.optim.SGD, md.optim.LazyAdam, torch.optim.Adagrad, torch.optim.SGD]
)
def test_gradients_of_packed_batches(cls):
    gradient, parameters = some_gradient((2, 4, 6), 0), []
    gradient = gradient.mask_with(gradient.get_mask()[..., :1])
    for given in (gradient, gradient.to_packed()):
        parameters.append(nn.Parameter(torch.ones(2, 4, 6)))
        parameters[-1].grad = given
        with md.densify("never"):
            cls(parameters[-1:], lr=0.1).step()
    assert torch.equal(*parameters)
    assert torch.equal(parameters[0] != 1, gradient.get_mask())
