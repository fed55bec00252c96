"""torch.masked's functions given masked tensors, with and without `mask=`: loops over what is valid and let in."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import masked_dispatch as md
from op_registry.ops.reductions.torch_masked import OPERATORS
from torch_masked_operands import LET_IN, NAN, VALID, F, T, values, x

NOTHING = torch.tensor([[T], [T], [T], [F]])  # nothing of the last row, everything of the others
REDUCTIONS = sorted(OPERATORS)
MASKS: dict[str, Any] = {
    "none": lambda: None,
    "plain": lambda: LET_IN,
    "plain, a row": lambda: NOTHING,
    "masked": lambda: md.masked_tensor(LET_IN, torch.tensor([T, T, F, F])),
}


def let_in(mask: Any) -> tuple[Tensor, Tensor]:
    """Where `mask` lets an element in, and where it says anything at all."""
    if mask is None:
        return torch.ones_like(VALID), torch.ones_like(VALID)
    known = mask.get_mask() if md.is_masked_tensor(mask) else torch.ones_like(mask)
    given = mask.to_tensor(False) if md.is_masked_tensor(mask) else mask
    return given.expand(VALID.shape), known.expand(VALID.shape)


def row_by_row(name: str, mask: Any, data: Tensor, **options: Any) -> list[Tensor | None]:
    """The function of what counts of each row; None where that is invalid."""
    inside, known = let_in(mask)
    function, found = getattr(torch.masked, name), []
    for i in range(len(VALID)):
        place = (VALID[i] & inside[i] & known[i]).nonzero().reshape(-1)
        if len(place):
            result = function(data[i][place], dim=0, **options)
            found.append(place[int(result)].to(result.dtype) if name.startswith("arg") else result)
        elif bool((~inside[i] & known[i]).all()):
            found.append(function(torch.zeros(4, dtype=torch.float64), dim=0, mask=torch.tensor([F] * 4)))
        else:
            found.append(None)
    return found


# Each function with one kind of mask, one of each kind of function with all.
ASKED = dict.fromkeys(
    [*zip(REDUCTIONS, itertools.cycle(MASKS), strict=False), *itertools.product(("argmin", "mean", "prod"), MASKS)]
)


@pytest.mark.parametrize(("name", "kind"), ASKED)
def test_reductions_of_what_is_valid_and_let_in(name: str, kind: str) -> None:
    mask = MASKS[kind]()
    for garbage in (NAN, math.inf, -1e300):
        got = getattr(torch.masked, name)(x(garbage), dim=1, mask=mask)
        expected = row_by_row(name, mask, values())
        assert got.get_mask().tolist() == [value is not None for value in expected]
        for mine, theirs in zip(got.get_data(), expected, strict=True):
            if theirs is not None:
                assert_close(mine, theirs, equal_nan=True)


@pytest.mark.parametrize("name", [n for n in REDUCTIONS if not n.startswith("arg")])
def test_gradients(name: str) -> None:
    leaf = x(requires_grad=True)
    options = {"correction": 0} if name in ("var", "std") else {}
    got = getattr(torch.masked, name)(leaf, dim=1, mask=LET_IN, **options)
    got.to_tensor(0.0).nan_to_num().sum().backward()
    data = values().requires_grad_()
    wanted = [value for value in row_by_row(name, LET_IN, data, **options) if value is not None]
    torch.stack(wanted).nan_to_num().sum().backward()
    assert torch.equal(leaf.grad.get_mask(), VALID)
    assert_close(leaf.grad.to_tensor(0.0), data.grad.nan_to_num())


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_plain_tensor_with_a_masked_mask(name: str) -> None:
    mask = md.masked_tensor(torch.tensor([T, T, F, F]), torch.tensor([T, F, T, F]))
    got = getattr(torch.masked, name)(values()[0], dim=0, mask=mask)
    want = getattr(torch.masked, name)(values()[0], dim=0, mask=torch.tensor([T, F, F, F]))
    assert_close(got.to_tensor(NAN), want, equal_nan=True)
    nothing = getattr(torch.masked, name)(values()[0], dim=0, mask=mask.mask_with(torch.tensor([F, T, T, T])))
    assert not bool(nothing.get_mask())  # of the first two nobody knows whether they are let in


@pytest.mark.parametrize("name", ["sum", "prod", "mean", "amax", "norm", "logsumexp", "var"])
def test_dims_dtypes_and_shapes_are_torchs(name: str) -> None:
    data = torch.rand(2, 3, 4)
    stored = md.masked_tensor(data, torch.ones(2, 3, 4, dtype=torch.bool))
    function = getattr(torch.masked, name)
    for dim in (None, 0, -1, (0, 2), (2, 1), (0, 1, 2), ()):
        for options in ({}, {"keepdim": True}, {"dtype": torch.float64}, {"mask": data[0] > 0.2}):
            got, want = function(stored, dim=dim, **options), function(data, dim=dim, **options)
            assert (got.shape, got.dtype) == (want.shape, want.dtype)
            assert bool(got.get_mask().all())
            assert_close(got.get_data(), want, equal_nan=True)


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
        with torch.profiler.profile() as profile:
            ran.append(function(values(), dim=1, mask=LET_IN))
        assert type(ran[0]) is Tensor
        assert not any(str(operator._schema.name) in event.key for event in profile.key_averages())


def test_errors_are_torchs() -> None:
    with pytest.raises(IndexError, match="Dimension out of range"):
        torch.masked.sum(x(), 5)
    with pytest.raises(IndexError, match="broadcastable mask"):
        torch.masked.sum(x(), 1, mask=torch.ones(2, 4, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="no fully masked out rows"):
        torch.masked.median(x().to(torch.int64), 1, mask=NOTHING)
