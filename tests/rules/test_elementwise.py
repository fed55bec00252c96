"""Pointwise operators, differences, activations, fake quantisation and lists: what the laws do not ask of every one.

When operands are filled and with what, numbers at which a derivative is infinite, kernels that must not see garbage,
and forms that no entry of torch's database calls.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload

import masked_dispatch as md
from bare_records import apply, masked, shown
from masked_dispatch import masked_tensor
from op_registry import registry
from op_registry.authoring import Dense
from op_registry.autocast import autocast_off, autocast_on
from op_registry.laws.categories import run_elementwise
from op_registry.schema import functional_call, functional_form, single_form
from op_registry.traits import Traits

aten = torch.ops.aten
NAN, INF = math.nan, math.inf


def total(record: Dense) -> Tensor:
    """The sum of what is valid, as the closing layer would let a gradient in."""
    return record.filled(0).sum()


def gradient(record: Dense, loss: Tensor) -> list[Any]:
    """The gradient of `loss` where `record`, a leaf, is valid: the opening layer drops the rest."""
    (grad,) = torch.autograd.grad(loss, record.data, retain_graph=True, create_graph=True)
    return shown(record.like(grad.detach()))


# ----------------------------------------------------------------------------------------------------- by hand


@pytest.mark.parametrize("garbage", [NAN, INF, 0.0])
def test_gradient_of_a_plain_operand_reads_no_garbage(garbage: float) -> None:
    x = masked([3.0, garbage], [1, 0])
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    for op, expected in ((aten.mul.Tensor, 3.0), (aten.div.Tensor, -3 / 4), (aten.pow.Tensor_Tensor, 9 * math.log(3))):
        result = apply(op, x, Dense(scale))
        assert result.dtype is torch.float32, "a 0-d operand must not weigh in with its dtype"
        (grad,) = torch.autograd.grad(total(result), scale)
        assert grad.item() == pytest.approx(expected)


def test_fills_only_where_a_gradient_could_reach_a_valid_element() -> None:
    x = masked([1.0, NAN], [1, 0], requires_grad=True)
    same = Dense(torch.tensor([2.0, NAN]), x.validity)
    other = masked([2.0, NAN], [1, 0])
    assert apply(aten.div.Tensor, x, same).data.isnan()[1]
    assert not apply(aten.div.Tensor, x, other).data.isnan()[1]
    with torch.no_grad():
        assert apply(aten.div.Tensor, x, other).data.isnan()[1]


def test_filling_keeps_bools_bool() -> None:
    x, y = masked([True, True], [1, 0]), masked([True, True], [0, 1])
    assert run_elementwise(aten.mul.Tensor, x, y, _traits=Traits(traps=True)).dtype is torch.bool


# ------------------------------------------------------------------------------------------------ integer kernels


@pytest.mark.parametrize(
    "op", [aten.floor_divide.default, aten.remainder.Tensor, aten.fmod.Tensor, aten.gcd.default, aten.lcm.default]
)
def test_integer_kernels_do_not_see_garbage(op: Any) -> None:
    least = torch.iinfo(torch.int64).min
    x = masked([7, least, least], [1, 0, 1])
    y = masked([2, -1, 0], [1, 0, 0])
    assert shown(apply(op, x, y)) == [op(torch.tensor(7), torch.tensor(2)).item(), "--", "--"]


def test_integer_division_by_a_number_and_with_a_rounding_mode() -> None:
    x = masked([7, torch.iinfo(torch.int64).min], [1, 0])
    assert shown(apply(aten.floor_divide.Scalar, x, -1)) == [-7, "--"]
    zero = masked([2, 0], [1, 0])
    assert shown(apply(aten.div.Tensor_mode, x, zero, rounding_mode="floor")) == [3, "--"]
    assert shown(apply(aten.remainder.Scalar_Tensor, 7, zero)) == [1, "--"]
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        apply(aten.floor_divide.default, x, Dense(torch.tensor([0, 0])))


def test_garbage_degrees_do_not_run_for_hours() -> None:
    degree = masked([2.0, 1e18], [1, 0])
    assert shown(apply(aten.special_legendre_polynomial_p.x_scalar, 0.5, degree)) == [-0.125, "--"]


# -------------------------------------------------------------------------------- derivatives that are infinite


@pytest.mark.parametrize(
    "op", [aten.div.Tensor, aten.pow.Tensor_Tensor, aten.atan2.default, aten.hypot.default, aten.xlogy.Tensor]
)
@pytest.mark.parametrize("singular", [0.0, INF])
def test_a_singular_value_that_meets_nothing_valid_has_gradient_zero(op: Any, singular: float) -> None:
    y = torch.tensor([singular, 1.0], requires_grad=True)
    for operands in ((masked([NAN, 1.0], [0, 1]), Dense(y)), (Dense(y), masked([NAN, 1.0], [0, 1]))):
        (grad,) = torch.autograd.grad(total(apply(op, *operands)), y)
        assert grad[0] == 0
        assert grad[1].isfinite()


# --------------------------------------------------------------------------------------------------- activations


@pytest.mark.parametrize("training", (False, True))
def test_rrelu_gives_no_invalid_noise_away(training: bool) -> None:
    """Without training the noise comes back as it was given; in training it is overwritten, and its mask with it."""
    x, noise = masked([-1.0, 2.0, -3.0], [1, 0, 1]), masked([0.5, math.inf, NAN], [1, 1, 0])
    _, drawn = apply(aten.rrelu_with_noise_functional.default, x, noise, 0.1, 0.3, training)
    first, second, third = shown(drawn, "--")
    assert second == "--"
    if training:
        assert 0.1 <= first <= 0.3
        assert 0.1 <= third <= 0.3
    else:
        assert (first, third) == (0.5, "--")


@pytest.mark.parametrize("in_place", [False, True])
def test_rrelu_writes_its_slopes(in_place: bool) -> None:
    """To a plain tensor an update, to a masked one with their validity; without training nothing is written."""
    function = aten.rrelu_with_noise_.default if in_place else aten.rrelu_with_noise.default
    mask = torch.tensor([True, False, True, True])
    for noise in (torch.full((4,), 9.0), md.masked_tensor(torch.full((4,), 9.0))):
        for training in (False, True):
            x = md.masked_tensor(torch.tensor([-2.0, NAN, 3.0, -4.0]), mask)
            leaf = x.clone().requires_grad_()
            with md.updates("silent"):
                result = function(leaf.clone() if in_place else leaf, noise, 0.1, 0.3, training)
            slopes = noise.get_data() if isinstance(noise, md.MaskedTensor) else noise
            assert result.get_mask().tolist() == mask.tolist()
            if training:
                assert slopes[2] == 1
                assert 0.1 <= slopes[[0, 3]].min() <= slopes[[0, 3]].max() <= 0.3
                assert torch.equal(result.get_data()[[0, 2, 3]], torch.tensor([-2.0, 3.0, -4.0]) * slopes[[0, 2, 3]])
                result.sum().backward()
                assert torch.equal(leaf.grad.get_data()[[0, 2, 3]], slopes[[0, 2, 3]])
            else:
                assert torch.equal(slopes, torch.full((4,), 9.0))
        if isinstance(noise, md.MaskedTensor):
            assert noise.get_mask().tolist() == mask.tolist()
        else:
            assert noise[1] == 9


def test_rrelu_draws_nothing_from_garbage() -> None:
    streams = set()
    for garbage in (NAN, -1.0, 1.0):
        torch.manual_seed(0)
        x = masked([-1.0, garbage, -1.0], [1, 0, 1])
        streams.add(tuple(shown(apply(aten.rrelu.default, x, 0.1, 0.9, True))))
    assert len(streams) == 1


# --------------------------------------------------------------------------------------------------------- lists


def test_an_inf_under_the_mask_is_no_inf_to_the_gradient_scaler() -> None:
    def check(x: Dense) -> tuple[Any, float]:
        found = Dense(torch.zeros(()))
        apply(aten._amp_foreach_non_finite_check_and_unscale_.default, [x], found, Dense(torch.tensor(0.5)))
        return shown(x), found.data.item()

    assert check(masked([2.0, INF], [1, 0])) == ([1.0, "--"], 0.0)
    assert check(masked([INF, NAN], [1, 0])) == ([INF, "--"], 1.0)


def test_sums_of_lists_are_over_valid_elements() -> None:
    x, nothing = masked([3.0, NAN, -1.0], [1, 0, 1], requires_grad=True), masked([NAN], [0])
    assert [shown(s) for s in apply(aten._foreach_norm.Scalar, [x, nothing], 1)] == [[4.0], ["--"]]
    sums = apply(aten._foreach_powsum.Scalar, [x, nothing], 2)
    assert [shown(s) for s in sums] == [[10.0], ["--"]]
    assert gradient(x, total(sums[0])) == [6.0, "--", -2.0]


def test_maximum_of_lists_is_clamp_min_where_maximum_has_no_such_form() -> None:
    assert single_form(aten._foreach_maximum.List) is aten.maximum
    assert single_form(aten._foreach_maximum.Scalar) is aten.clamp_min
    assert single_form(aten._foreach_maximum_.List) is aten.clamp_min_
    assert single_form(aten._foreach_minimum_.ScalarList) is aten.clamp_max_


def test_functional_forms_are_called_as_what_they_stand_for() -> None:
    x = torch.rand(3)
    assert functional_form(aten.polygamma_.default) is aten.polygamma.default
    assert torch.equal(functional_call(aten.polygamma_.default)(x, 1), torch.polygamma(1, x))
    assert functional_call(aten.add_.Tensor) is aten.add.Tensor
    torch.manual_seed(0)
    drawn = functional_call(aten.bernoulli_.float)(x)
    torch.manual_seed(0)
    assert torch.equal(drawn, x.bernoulli_())


def test_a_large_operand_is_filled_under_a_mask_that_is_larger_still() -> None:
    """`gcd` of a matrix and a row of 20,000 numbers raised: the fill of a large tensor wrote to one as small as it."""
    numbers, row = torch.arange(60000).reshape(3, 20000), torch.arange(20000)
    mask = numbers % 3 > 0
    result = torch.gcd(masked_tensor(numbers, mask), row)
    assert torch.equal(result.get_mask(), mask)
    assert torch.equal(result.to_tensor(0), torch.where(mask, torch.gcd(numbers, row), 0))


# -------------------------------------------------------------------------------------- fake quantisation, assertions


KNOWN = torch.tensor([[True, False, True], [False, True, True]])
DATA = torch.tensor([[1.13, 9.0, 3.0], [0.5, -2.26, 100.0]])
CHANNELS = torch.tensor([0.1, 0.2, 0.3])
ZEROS = torch.zeros(3, dtype=torch.int32)


def test_an_invalid_scale_makes_its_channel_invalid() -> None:
    scale = md.masked_tensor(CHANNELS, torch.tensor([True, True, False]))
    got = torch.fake_quantize_per_channel_affine(DATA, scale, ZEROS, 1, -128, 127)
    assert got.get_mask().tolist() == [[True, True, False]] * 2
    one = torch.fake_quantize_per_tensor_affine(DATA, scale[2:], ZEROS[:1], -128, 127)
    assert not one.get_mask().any()


def test_an_assertion_of_an_invalid_number_fails() -> None:
    x = md.masked_tensor(torch.ones(2), torch.tensor([True, False]))
    torch._assert_async(x[0])
    with pytest.raises(RuntimeError, match="got zero"):
        torch._assert_async(x[1])


# --------------------------------------------------------------------------------------- the number that is filled in


def operators() -> Iterator[OpOverload]:
    """Elementwise overloads that need nothing but tensors."""
    for op in sorted(registry, key=str):
        rule = registry.get(op)
        needed = {str(a.type) for a in op._schema.arguments if not a.has_default_value()}
        if rule is not None and rule.run is run_elementwise and needed == {"Tensor"}:
            yield op


def operands(op: OpOverload, value: float) -> list[torch.Tensor]:
    number = sum(not a.has_default_value() for a in op._schema.arguments)
    return [torch.full((2,), value, dtype=torch.float64, requires_grad=True) for _ in range(number)]


def is_smooth_at(op: OpOverload, value: float) -> bool | None:
    """Whether value and derivatives are finite there; None where the operator takes no such operands in float64."""
    given = operands(op, value)
    try:
        result = op(*given)
    except RuntimeError:
        return None
    if not isinstance(result, torch.Tensor) or not result.requires_grad or result.is_complex():
        return None
    try:
        first = torch.autograd.grad(result.sum(), given, create_graph=True, allow_unused=True)
    except RuntimeError:  # torch has no derivative
        return None
    found = [result, *(g for g in first if g is not None)]
    twice = [g.sum() for g in first if g is not None and g.requires_grad]
    if twice:
        with contextlib.suppress(RuntimeError):  # no second one
            found += [g for g in torch.autograd.grad(sum(twice), given, allow_unused=True) if g is not None]
    return all(bool(t.isfinite().all()) for t in found)


def test_operators_are_smooth_at_their_neutral_fill() -> None:
    smooth = {op: is_smooth_at(op, float(registry.get(op).traits.neutral)) for op in operators()}
    assert [str(op) for op, answer in smooth.items() if answer is False] == []
    assert sum(answer is True for answer in smooth.values()) > 80
    assert is_smooth_at(aten.acosh.default, 1.0) is False


@pytest.mark.parametrize("hidden", [float("nan"), 7.0, 1.0])
@pytest.mark.parametrize("name", ["acos", "acosh", "asin", "atanh", "erfinv", "logit", "special_ndtri"])
def test_detect_anomaly_has_no_objection(name: str, hidden: float) -> None:
    value = 1.5 if name == "acosh" else 0.25
    plain = torch.tensor([value], requires_grad=True)
    getattr(aten, name)(plain).sum().backward()
    x = md.masked_tensor(torch.tensor([value, hidden]), torch.tensor([True, False]), requires_grad=True)
    with torch.autograd.set_detect_anomaly(True):
        getattr(aten, name)(x).sum().backward()
    assert x.grad.get_mask().tolist() == [True, False]
    assert x.grad[0].item() == plain.grad.item()


# ----------------------------------------------------------------------------------------------------------- autocast


CPU, META = torch.device("cpu"), torch.device("meta")


def test_on_where_it_is_on() -> None:
    assert not autocast_on(CPU)
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast_on(CPU)
        with autocast_off(CPU):
            assert not autocast_on(CPU)
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
        assert autocast_on(CPU)


def test_a_device_without_autocast() -> None:
    with pytest.raises(RuntimeError, match="unknown device type for autocast"):
        torch.is_autocast_enabled("meta")
    assert not autocast_on(META)
    with autocast_off(META):
        assert not autocast_on(META)


@pytest.mark.parametrize("on", [False, True])
def test_contractions_count_in_float32(on: bool) -> None:
    """Also where autocast would have them counted in bfloat16."""
    mask = torch.tensor([[True, False], [False, False]])
    with torch.autocast("cpu", torch.bfloat16, enabled=on):
        result = md.masked_tensor(torch.ones(2, 2), mask) @ torch.ones(2, 2)
    assert result.dtype is (torch.bfloat16 if on else torch.float32)
    assert result.get_mask().tolist() == [[True, True], [False, False]]


# -------------------------------------------------------------------------------------------------------- differences


def test_what_a_component_does_not_read_has_no_part_in_its_derivative() -> None:
    x = md.masked_tensor([[NAN, 2.0, 3.0]], [[False, True, True]], requires_grad=True)
    torch.linalg.cross(x, torch.tensor([[math.inf, 5.0, 7.0]])).sum().backward()
    assert x.grad is not None
    assert x.grad.get_data()[0, 1:].tolist() == [7.0, -5.0]


@pytest.mark.parametrize("spaced", (False, True))
@pytest.mark.parametrize("hidden", (NAN, torch.finfo(torch.float32).max))
def test_a_trapezoid_of_one_point_reads_nothing(hidden: float, spaced: bool) -> None:
    """It has no interval, so it is torch's 0; torch computes that from the point."""
    y = md.masked_tensor([[1.0], [hidden]], [[True], [False]], requires_grad=True)
    points = md.masked_tensor([hidden], [False])
    out = torch.trapezoid(y, points, dim=1) if spaced else torch.trapezoid(y, dx=2, dim=1)
    assert out.to_tensor(5).tolist() == [0.0, 0.0]
    out.sum().backward()
    assert y.grad is not None
    assert y.grad.to_tensor(5).tolist() == [[0.0], [5.0]]
