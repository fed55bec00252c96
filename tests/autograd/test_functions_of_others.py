"""P5 for autograd functions that are not this project's: gradients equal those of the same computation in operators.

The functions are torch's own and some written by hand (tests/helpers/functions_of_others.py); compiled, they are in
tests/thorough/autograd/test_functions_of_others_in_graphs.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import masked_dispatch as md
from functions_of_others import CASES, WITH_TANGENTS, Function, gradients, masked, tangents

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning"),
]

EACH = [
    pytest.param(case.call, case.operators, storage, id=f"{name.rpartition('.py ')[2]}-{storage}")
    for name, case in CASES.items()
    for storage in case.storages
]


def check_gradients(found: tuple[Tensor | None, ...], wanted: tuple[Tensor | None, ...]) -> None:
    of_x, of_w = found
    assert isinstance(of_x, md.MaskedTensor) or wanted[0] is None
    assert not isinstance(of_w, md.MaskedTensor)
    for gradient, other in zip(found, wanted, strict=True):
        assert (gradient is None) == (other is None)
        if gradient is not None:
            md.testing.assert_close(gradient, other)


@pytest.mark.parametrize(("call", "operators", "storage"), EACH)
def test_gradients(call: Function, operators: Function, storage: torch.layout) -> None:
    check_gradients(gradients(call, storage), gradients(operators, storage))


@pytest.mark.parametrize(
    ("call", "operators", "storage", "reentrant"),
    [pytest.param(*case.values, number % 2 == 0, id=case.id) for number, case in enumerate(EACH)],
)
def test_gradients_in_a_checkpoint(call: Function, operators: Function, storage: torch.layout, reentrant: bool) -> None:
    def again(x: Tensor, w: Tensor) -> Any:
        return checkpoint(call, x, w, use_reentrant=reentrant)

    check_gradients(gradients(again, storage), gradients(operators, storage))


@pytest.mark.parametrize(
    ("call", "operators", "storage"),
    [
        pytest.param(case.call, case.operators, storage, id=f"{name.rpartition('.py ')[2]}-{storage}")
        for name, case in CASES.items()
        for storage in case.storages
        if name in WITH_TANGENTS
    ],
)
def test_tangents(call: Function, operators: Function, storage: torch.layout) -> None:
    x, tangent = masked(storage).detach(), masked(storage, 3.0).detach()
    for ours, other in zip(tangents(call, x, tangent), tangents(operators, x, tangent), strict=True):
        assert type(ours) is type(other)
        if ours is not None:
            md.testing.assert_close(ours, other)
