"""Fused optimizer steps: with masked parameters, or masked gradients of plain ones, those of foreach=False."""

from __future__ import annotations

import math

import pytest
import torch
from torch.optim import SGD, Adagrad, Adam, AdamW

from masked_dispatch import as_masked_tensor, is_masked_tensor

# Their formula is the subject here, not where it leads.
pytestmark = pytest.mark.filterwarnings("ignore:.* steps a plain parameter with a masked gradient:UserWarning")

aten = torch.ops.aten

# Options that tests/optim/test_stock_table.py does not combine.
OPTIMIZERS = [
    (AdamW, {"lr": torch.tensor(0.05)}),
    (SGD, {"momentum": 0.9, "dampening": 0.3, "maximize": True}),
    (SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (SGD, {"lr": torch.tensor(0.05)}),
    (Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1}),
]
IDS = [f"{cls.__name__}-{'-'.join(options) or 'plain'}" for cls, options in OPTIMIZERS]


def seen(tensor):
    """Values, zeros where invalid, and mask."""
    if is_masked_tensor(tensor):
        return tensor.to_tensor(0).detach(), tensor.get_mask()
    return tensor.detach(), None


def same(a, b):
    (values, mask), (others, other_mask) = seen(a), seen(b)
    assert (mask is None) == (other_mask is None)
    assert mask is None or mask.equal(other_mask)
    torch.testing.assert_close(values, others)


def hidden(data, mask):
    return as_masked_tensor(torch.where(mask, data, math.nan), mask)


def trained(cls, options, parameters_are_masked, **implementation):
    """Parameters after three steps with gradients whose masks, for plain parameters, are others each time."""
    torch.manual_seed(0)
    masks = [torch.rand(3, 4) < 0.6, torch.rand(5) < 0.6]
    parameters = []
    for mask in masks:
        data = torch.randn(mask.shape)
        parameters.append((hidden(data, mask) if parameters_are_masked else data).detach().requires_grad_())
    optimizer = cls(parameters, **{"lr": 0.1, **options}, **implementation)
    for _ in range(3):
        for parameter, mask in zip(parameters, masks, strict=True):
            known = mask if parameters_are_masked else torch.rand(mask.shape) < 0.6
            parameter.grad = hidden(torch.randn(mask.shape), known)
        optimizer.step()
    return parameters, optimizer


@pytest.mark.parametrize("parameters_are_masked", [True, False])
@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS, ids=IDS)
def test_fused_is_the_single_tensor_formula(cls, options, parameters_are_masked):
    fused, a = trained(cls, options, parameters_are_masked, fused=True)
    single, b = trained(cls, options, parameters_are_masked, foreach=False)
    for p, q in zip(fused, single, strict=True):
        same(p, q)
        assert a.state[p].keys() == b.state[q].keys()
        for name, state in a.state[p].items():
            if state is not None:
                same(state, b.state[q][name])


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("cls", [Adam, SGD, Adagrad])
def test_scaled_gradients(cls, overflow):
    """With a GradScaler: the scale is taken back, and a step with an infinite (valid) gradient is not taken."""
    mask = torch.tensor([True, False, True])

    def stepped(**implementation):
        parameter = torch.ones(3, requires_grad=True)
        optimizer = cls([parameter], lr=0.1, **implementation)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
        for step in range(2):
            optimizer.zero_grad()
            factor = math.inf if overflow and step else 1.0
            scaler.scale(parameter.sum() * 0).backward()
            grad = 4.0 * factor * torch.tensor([0.5, 1.0, -2.0])
            parameter.grad = hidden(grad, mask)
            scaler.step(optimizer)
            scaler.update()
        return parameter, optimizer.state[parameter]

    (fused, states), (single, others) = stepped(fused=True), stepped(foreach=False)
    same(fused, single)
    assert fused[1] == 1.0
    for name, state in states.items():
        if state is not None:
            same(state, others[name])


def test_the_scale_is_taken_from_the_gradients_in_place():
    parameter, grad = torch.ones(3), hidden(torch.full((3,), 8.0), torch.tensor([True, True, False]))
    options = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.5, "dampening": 0.0, "nesterov": False, "maximize": False}
    aten._fused_sgd_([parameter], [grad], [], **options, is_first_step=False, grad_scale=torch.tensor(4.0))
    assert grad.get_mask().tolist() == [True, True, False]
    assert grad.to_tensor(0).tolist() == [2.0, 2.0, 0.0]
    assert parameter.tolist() == [0.0, 0.0, 1.0]
    aten._fused_sgd_(
        [parameter], [grad], [], **options, is_first_step=False, grad_scale=torch.tensor(4.0), found_inf=torch.ones(())
    )
    assert grad[0].item() == 2.0
    assert parameter.tolist() == [0.0, 0.0, 1.0]


def test_functional_forms_give_copies():
    mask = torch.tensor([True, False])
    lists = [[hidden(torch.full((2,), value), mask)] for value in (1.0, 0.5, 0.0, 0.0)]
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
    options |= {"weight_decay": 0.0, "amsgrad": False, "maximize": False}
    results = aten._fused_adam(*lists, [], [torch.tensor(1.0)], **options)
    assert [len(r) for r in results] == [1, 1, 1, 1, 0]
    assert lists[0][0].to_tensor(0).tolist() == [1.0, 0.0]
    assert results[0][0].get_mask().equal(mask)
    assert results[0][0].to_tensor(0).tolist() == pytest.approx([0.9, 0.0])
