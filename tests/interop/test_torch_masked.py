"""torch.masked's functions given masked tensors, with and without `mask=`.

What they give of what is valid and let in, the laws ask by loops (op_registry/conformance/oracles/pointwise.py).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import masked_dispatch as md
from op_registry.ops.reductions.torch_masked import OPERATORS

NAN = math.nan
T, F = True, False
# Rows: all valid, some, one, none.
VALID = torch.tensor([[T, T, T, T], [T, F, T, T], [F, F, T, F], [F, F, F, F]])
# Columns of the table below: what mask= lets in.
LET_IN = torch.tensor([T, F, T, F])


def values() -> Tensor:
    return torch.rand(VALID.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64) + 0.5


def x(garbage: float = NAN, requires_grad: bool = False) -> md.MaskedTensor:
    return md.masked_tensor(torch.where(VALID, values(), garbage), VALID, requires_grad=requires_grad)


REDUCTIONS = sorted(OPERATORS)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_plain_tensor_with_a_masked_mask(name: str) -> None:
    mask = md.masked_tensor(torch.tensor([T, T, F, F]), torch.tensor([T, F, T, F]))
    got = getattr(torch.masked, name)(values()[0], dim=0, mask=mask)
    want = getattr(torch.masked, name)(values()[0], dim=0, mask=torch.tensor([T, F, F, F]))
    assert_close(got.to_tensor(NAN), want, equal_nan=True)
    nothing = getattr(torch.masked, name)(values()[0], dim=0, mask=mask.mask_with(torch.tensor([F, T, T, T])))
    assert not bool(nothing.get_mask())  # of the first two nobody knows whether they are let in


def test_integers_and_complex() -> None:
    integers = md.masked_tensor(torch.tensor([[1, 2, -9]]), torch.tensor([[T, T, F]]))
    assert torch.masked.sum(integers, 1).tolist() == [3]
    assert torch.masked.var(integers, 1).tolist() == [0.5]
    assert torch.masked.std(integers, 1, unbiased=False).tolist() == [0.5]
    assert torch.masked.median(integers, 1).tolist() == [1]
    assert torch.masked.median(integers, 1).dtype is torch.int64
    with pytest.raises(ValueError, match="Could not infer output dtype"):
        torch.masked.mean(integers, 1)
    numbers = md.masked_tensor(torch.tensor([3 + 4j, 1j, complex(NAN, 0)]), torch.tensor([T, T, F]))
    assert torch.masked.norm(numbers, 1).item() == 6.0
    assert torch.masked.var(numbers, correction=0).dtype is torch.complex64
    assert_close(torch.masked.var(numbers, correction=0).get_data(), torch.tensor(4.5 + 0j))


def test_a_mean_of_what_is_there_and_no_argmax_of_what_is_left_out() -> None:
    """What taking torch's functions apart would give: a third of the sum, and the place of a fill."""
    row = md.masked_tensor(torch.tensor([6.0, NAN, NAN]), torch.tensor([T, F, F]))
    assert torch.masked.mean(row).item() == 6.0
    low = md.masked_tensor(torch.tensor([NAN, 5.0, -math.inf]), torch.tensor([F, T, T]))
    assert torch.masked.argmax(low, mask=torch.tensor([F, F, T])).item() == 2
    assert not bool(torch.masked.argmax(low, mask=torch.tensor([T, F, F])).get_mask())


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "softmin", "cumsum", "cumprod", "normalize"])
def test_what_is_left_out_of_the_others_takes_part_as_identity(name: str) -> None:
    """Where all of a row is let in or not there at all, they are the operators that they are named after."""
    function = getattr(torch.masked, name)
    before = (2.0,) if name == "normalize" else ()
    for i, valid in enumerate(VALID[:3]):
        got = function(x()[i], *before, 0, mask=LET_IN)
        want = function(values()[i][valid], *before, 0, mask=LET_IN[valid])
        seen = (valid & LET_IN).nonzero().reshape(-1)
        assert bool(got.get_mask()[seen].all())
        assert_close(got.get_data()[seen], want[LET_IN[valid]])


def test_logaddexp_is_elementwise_and_its_masks_mean_minus_infinity() -> None:
    a = md.masked_tensor(torch.tensor([1.0, 2.0, NAN]), torch.tensor([T, T, F]))
    b = torch.tensor([1.0, 1.0, 1.0])
    got = torch.masked.logaddexp(a, b, input_mask=torch.tensor([T, F, T]))
    assert got.get_mask().tolist() == [T, T, F]
    assert_close(got.get_data()[:2], torch.tensor([1.0 + math.log(2.0), 1.0]))


def test_plain_tensors_get_torchs_own_function() -> None:
    for name, operator in OPERATORS.items():
        function = getattr(torch.masked, name)
        assert function.__name__ == name
        assert function.__module__ == "torch.masked._ops"
        ran: list[Any] = []
        with torch.profiler.profile(acc_events=True) as profile:
            ran.append(function(values(), dim=1, mask=LET_IN))
        assert type(ran[0]) is Tensor
        assert not any(str(operator._schema.name) in event.key for event in profile.key_averages())


def test_errors_are_torchs() -> None:
    with pytest.raises(IndexError, match="Dimension out of range"):
        torch.masked.sum(x(), 5)
    with pytest.raises(IndexError, match="broadcastable mask"):
        torch.masked.sum(x(), 1, mask=torch.ones(2, 4, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="no fully masked out rows"):
        torch.masked.median(x().to(torch.int64), 1, mask=torch.tensor([[T], [T], [T], [F]]))
