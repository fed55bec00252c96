"""Every optimizer of torch.optim, with each of its options, on masked tensors: helpers/stock_optimizers.py says what.

Here gradients are stored in one way for each optimizer, by turns; in every way they are in
thorough/optim/test_stock_table_in_every_storage.py.
"""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import nn

import masked_dispatch as md
from masked_dispatch.optim.stock import INSTEAD, REFUSED
from stock_optimizers import (
    EXACT,
    MASKS,
    ON_MASKED,
    ON_PLAIN,
    OPTIMIZERS,
    START,
    STORAGE,
    VALUES,
    check_masked_parameter,
    check_plain_parameter,
    gradients,
    steps,
)

BY_TURNS = [(name, list(STORAGE)[turn % len(STORAGE)]) for turn, name in enumerate(ON_PLAIN)]


def test_the_tables_have_every_optimizer():
    assert ON_PLAIN.keys() == ON_MASKED.keys() == OPTIMIZERS.keys()


@pytest.mark.parametrize("name, storage", BY_TURNS)
def test_plain_parameters_with_masked_gradients(name, storage):
    check_plain_parameter(name, storage)


@pytest.mark.parametrize("name, storage", BY_TURNS)
def test_masked_parameters(name, storage):
    check_masked_parameter(name, storage)


@pytest.mark.parametrize("storage", STORAGE)
def test_lbfgs_takes_the_vector_of_what_is_valid(storage):
    mask, final = MASKS[0], []
    whole = nn.Parameter(md.masked_tensor(START.where(mask, torch.nan), mask))
    for parameter, given in ((whole, gradients(storage, [mask] * 3)), (nn.Parameter(START[mask]), None)):
        seen = steps(torch.optim.LBFGS, {}, parameter, given or [value[mask] for value in VALUES])
        final.append(seen[-1])
    assert torch.equal(final[0].get_mask(), mask)
    torch.testing.assert_close(final[0].get_data()[mask], final[1], **EXACT)


@pytest.mark.parametrize("cls", [torch.optim.Adafactor, torch.optim.Muon], ids=lambda cls: cls.__name__)
def test_masked_parameters_that_are_valid_everywhere_take_the_plain_step(cls):
    parameters = [nn.Parameter(md.masked_tensor(START)), nn.Parameter(START.clone())]
    masked, plain = (
        steps(cls, {}, p, [md.masked_tensor(v) if md.is_masked_tensor(p) else v for v in VALUES])[-1]
        for p in parameters
    )
    torch.testing.assert_close(masked.to_tensor(0), plain, **EXACT)


@pytest.mark.parametrize("cls", REFUSED, ids=lambda cls: cls.__name__)
def test_a_refusal_says_why_and_names_what_works(cls):
    """Of subclasses, too, and of no plain gradient."""

    class Own(cls):
        pass

    parameter, there = nn.Parameter(torch.ones(2, 2)), torch.eye(2) > 0
    parameter.grad = torch.ones(2, 2)
    if cls is not torch.optim.SparseAdam:  # takes no dense gradients
        Own([parameter]).step(*([lambda: torch.zeros(())] if cls is torch.optim.LBFGS else []))
    parameter.grad = md.masked_tensor(torch.where(there, 1.0, torch.nan), there)
    names = INSTEAD.get(cls, cls.__name__)
    said = f"gradient masked, and Own {REFUSED[cls]}. Use masked_dispatch.optim.{names}, or"
    with pytest.raises(md.MaskedSemanticsError, match=f"^Own cannot step parameter 0 of shape .*{re.escape(said)}"):
        Own([parameter]).step()
    for name in names.split(" or "):
        before = parameter.detach().clone()
        getattr(md.optim, name)([parameter], lr=0.1).step()
        assert torch.equal(parameter != before, there)


def test_adafactor_says_why_it_refuses_a_masked_parameter():
    parameter = nn.Parameter(md.masked_tensor(torch.ones(3), torch.tensor([True, False, True])))
    parameter.square().sum().backward()
    with pytest.raises(
        md.MaskedSemanticsError,
        match=r"^Adafactor cannot step parameter 0 of shape \(3,\): the parameter is masked, elements of it or of its "
        r"gradient are invalid, and Adafactor divides sums over rows, columns and the parameter by their sizes, which "
        r"count invalid elements\. Use masked_dispatch\.optim\.Adagrad or LazyAdam$",
    ):
        torch.optim.Adafactor([parameter]).step()


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("name", sorted(name for name, outcome in ON_PLAIN.items() if outcome == "refused"))
def test_gradients_that_the_steps_closure_makes_are_refused_too(name, by_name):
    table = nn.Embedding(4, 2, sparse=True)
    before = table.weight.detach().clone()
    ids = md.masked_tensor(torch.tensor([0, 1]), torch.tensor([True, False]))
    optimizer = OPTIMIZERS[name](table.parameters())

    def closure():
        optimizer.zero_grad()
        loss = table(ids).square().sum()
        loss.backward()
        return loss

    with pytest.raises(md.MaskedSemanticsError, match=f"{name} cannot step parameter 0 of shape"):
        optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    assert torch.equal(table.weight, before)
    # LBFGS counts evaluations, from 0 on, before it calls its closure.
    assert all(value == 0 for value in optimizer.state[table.weight].values())


def test_why_stock_adam_is_warned_of():
    final = []
    for cls in (torch.optim.Adam, md.optim.LazyAdam):
        parameter = nn.Parameter(torch.ones(2))
        optimizer = cls([parameter], lr=0.01, betas=(0.9, 0.9))
        for step in range(100):
            parameter.grad = md.masked_tensor(torch.ones(2), torch.tensor([True, step == 0]))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.step()
        final.append(parameter.tolist())
    assert final[1] == pytest.approx([0.0, 0.99], abs=1e-3)
    assert final[0][0] == pytest.approx(0.0, abs=1e-3)
    assert final[0][1] < -1  # one gradient of a hundred, and it went further than the element that had them all
