"""torch's own optimizers and masked gradients of plain parameters: right, or refused before the step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import masked_dispatch as md
from masked_dispatch.optim.stock import INSTEAD, REFUSED

# test_stock_table.py says which warn.
pytestmark = pytest.mark.filterwarnings("ignore:.* steps a plain parameter with a masked gradient:UserWarning")

OPTIMIZERS = sorted(
    (cls for cls in vars(torch.optim).values() if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)),
    key=lambda cls: cls.__name__,
)
OPTIMIZERS.remove(torch.optim.Optimizer)
BY_NAME = {"ids": lambda value: getattr(value, "__name__", None)}
GRADIENTS = {
    "dense": lambda gradient: gradient,
    "COO": lambda gradient: gradient.to_sparse(),
    "CSR": lambda gradient: gradient.to_sparse_csr(),
}


def gradient(mask: Tensor) -> md.MaskedTensor:
    """Ones where valid, NaN elsewhere."""
    return md.masked_tensor(torch.where(mask, 1.0, torch.nan), mask)


@pytest.mark.parametrize("storage", GRADIENTS)
@pytest.mark.parametrize("cls", OPTIMIZERS, **BY_NAME)
def test_every_element_with_a_gradient_steps_or_the_optimizer_is_refused(cls, storage):
    parameter = nn.Parameter(torch.ones(4, 6))
    optimizer = cls([parameter], lr=0.1)
    upper = torch.ones(4, 6).triu() > 0
    for mask in (upper, ~upper, upper):  # what misses the first step has to take part in the second
        before = parameter.detach().clone()
        parameter.grad = GRADIENTS[storage](gradient(mask))
        if cls in REFUSED:
            with pytest.raises(md.MaskedSemanticsError, match=f"{cls.__name__} cannot step parameter 0 of shape"):
                optimizer.step(lambda: torch.zeros(())) if cls is torch.optim.LBFGS else optimizer.step()
            assert not optimizer.state[parameter]
            assert torch.equal(parameter, before)
            continue
        optimizer.step()
        assert parameter.isfinite().all()
        assert (parameter != before)[mask].all()


@pytest.mark.parametrize("cls", [cls for cls in REFUSED if hasattr(md.optim, cls.__name__)], **BY_NAME)
def test_a_refusal_names_the_optimizer_that_works(cls):
    parameter = nn.Parameter(torch.ones(2, 2))
    parameter.grad = gradient(torch.eye(2) > 0)
    with pytest.raises(md.MaskedSemanticsError, match=f"Use masked_dispatch.optim.{cls.__name__}"):
        cls([parameter]).step()
    getattr(md.optim, cls.__name__)([parameter]).step()
    assert torch.equal(parameter != 1, torch.eye(2) > 0)


@pytest.mark.parametrize(
    "name", sorted({name for cls in REFUSED for name in INSTEAD.get(cls, cls.__name__).split(" or ")})
)
def test_what_a_refusal_names_is_there(name):
    assert issubclass(getattr(md.optim, name), torch.optim.Optimizer)


@pytest.mark.parametrize("cls", REFUSED, **BY_NAME)
def test_subclasses_are_refused_and_other_parameters_are_not(cls):
    class Own(cls):
        pass

    plain = nn.Parameter(torch.ones(2, 2))
    plain.grad = torch.ones(2, 2)
    if cls is not torch.optim.SparseAdam:  # takes no dense gradients
        Own([plain]).step(*([lambda: torch.zeros(())] if cls is torch.optim.LBFGS else []))
    plain.grad = gradient(torch.eye(2) > 0)
    with pytest.raises(md.MaskedSemanticsError, match="Own cannot step parameter 0 of shape"):
        Own([plain]).step()


def test_a_table_of_looked_up_rows_stays_finite():
    table = nn.Embedding(4, 2, sparse=True)
    before = table.weight.detach().clone()
    indices = md.masked_tensor(torch.tensor([0, 1]), torch.tensor([True, False]))
    optimizer = md.optim.Adamax(table.parameters())
    table(indices).sum().backward()
    with pytest.raises(md.MaskedSemanticsError, match="0/0"):
        torch.optim.Adamax(table.parameters()).step()
    optimizer.step()
    assert torch.equal((table.weight != before).any(1), torch.tensor([True, False, False, False]))
