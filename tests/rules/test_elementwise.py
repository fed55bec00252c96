"""Pointwise rules, activations and lists on bare records.

Small cases that an eye can check, and one sweep over formulas of derivatives, which no entry of torch's database calls,
and an overload for each way of filling: whatever is under the masks, values, masks, gradients and second gradients are
those of the elements that are valid in all operands.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from bare_records import apply, masked, shown
from masked_dispatch import masked_tensor
from op_registry.authoring import Dense, Traits
from op_registry.laws.categories import run_elementwise
from op_registry.records.validity import as_int8
from op_registry.schema import functional_call, functional_form, single_form

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


def test_an_operation_needs_both_operands() -> None:
    x = masked([1.0, 2.0, NAN, INF], [1, 1, 0, 0])
    y = masked([10.0, NAN, 30.0, -INF], [1, 0, 1, 0])
    assert shown(apply(aten.add.Tensor, x, y)) == [11.0, "--", "--", "--"]
    assert shown(apply(aten.sub.Tensor, x, y, alpha=2)) == [-19.0, "--", "--", "--"]
    assert shown(apply(aten.rsub.Scalar, x, 5, 2)) == [3.0, 1.0, "--", "--"]
    assert shown(apply(aten.pow.Scalar, 2, x)) == [2.0, 4.0, "--", "--"]
    assert shown(apply(aten.maximum.default, x, Dense(torch.full((4,), 1.5)))) == [1.5, 2.0, "--", "--"]


def test_all_valid_is_plain_torch_and_stays_without_a_mask() -> None:
    x, y = Dense(torch.randn(5)), Dense(torch.randn(5))
    result = apply(aten.atan2.default, x, y)
    assert result.validity is None
    assert torch.equal(result.data, torch.atan2(x.data, y.data))


def test_nan_is_a_value_and_no_mask() -> None:
    x = masked([NAN, 1.0, NAN], [1, 1, 0])
    assert shown(apply(aten.isnan.default, x)) == [True, False, "--"]
    assert shown(apply(aten.nan_to_num.default, x, 0.0)) == [0.0, 1.0, "--"]
    assert shown(apply(aten.ne.Tensor, x, x)) == [True, False, "--"]


def test_masks_broadcast() -> None:
    column = masked([[1.0], [NAN]], [[1], [0]])
    row = masked([1.0, 2.0, NAN], [1, 1, 0])
    assert shown(apply(aten.mul.Tensor, column, row)) == [1.0, 2.0, "--", "--", "--", "--"]


@pytest.mark.parametrize("garbage", [NAN, INF, 0.0, -1e38])
def test_gradient_of_mul_div_and_pow_reads_no_garbage(garbage: float) -> None:
    for op, of_x, of_y in (
        (aten.mul.Tensor, 4.0, 3.0),
        (aten.div.Tensor, 1 / 4, -3 / 16),
        (aten.pow.Tensor_Tensor, 4 * 3.0**3, 81 * math.log(3)),
    ):
        x = masked([3.0, garbage, 3.0], [1, 0, 1], requires_grad=True)
        y = masked([4.0, 4.0, garbage], [1, 1, 0], requires_grad=True)
        loss = total(apply(op, x, y))
        assert gradient(x, loss) == pytest.approx([of_x, "--", 0.0])
        assert gradient(y, loss) == pytest.approx([of_y, 0.0, "--"])


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


# --------------------------------------------------------------------------------------------------- masked_fill


def test_an_invalid_entry_of_a_fill_mask_makes_the_element_invalid() -> None:
    x = masked([1.0, 2.0, NAN, 4.0], [1, 1, 0, 1])
    where = masked([True, False, True, True], [1, 1, 1, 0])
    assert shown(apply(aten.masked_fill.Scalar, x, where, 9.0)) == [9.0, 2.0, "--", "--"]


def test_an_invalid_fill_value_counts_only_where_it_is_written() -> None:
    x, where = masked([1.0, 2.0, NAN], [1, 1, 0]), Dense(torch.tensor([True, False, False]))
    value = masked(NAN, False)
    assert shown(apply(aten.masked_fill.Tensor, x, where, value)) == ["--", 2.0, "--"]


def test_gradient_of_masked_fill() -> None:
    x = masked([1.0, 2.0, NAN, 4.0], [1, 1, 0, 1], requires_grad=True)
    where = masked([True, False, True, True], [1, 1, 1, 0])
    value = torch.tensor(9.0, requires_grad=True)
    loss = (apply(aten.masked_fill.Tensor, x, where, Dense(value)).filled(0) ** 2).sum()
    assert gradient(x, loss) == [0.0, 4.0, "--", 0.0]
    assert torch.autograd.grad(loss, value)[0].item() == 18.0


# --------------------------------------------------------------------------------------- the sweep over overloads


def operands(op: Any) -> int:
    """How many tensors the operator has to be given."""
    return sum(str(a.type) == "Tensor" for a in op._schema.arguments)


def sample(op: Any, tensors: list[Any]) -> tuple[list[Any], dict[str, Any]]:
    """`tensors` in the places of the operator's tensors, and something for what else it requires."""
    rest, args, kwargs = iter(tensors), [], {}
    for a in op._schema.arguments:
        if str(a.type) == "Tensor":
            value = next(rest)
        elif a.has_default_value():
            continue
        else:
            value = {"rounding_mode": None, "is_result": False, "self_is_result": False}.get(a.name, 1.5)
        if a.kwarg_only:
            kwargs[a.name] = value
        else:
            args.append(value)
    return args, kwargs


# One that is not filled, one that is filled factor by factor, and some that are filled in all operands: with a neutral
# value of its own, without a derivative for an operand, of three operands. Conformance asks the others (P3, P5).
OF_EACH_TRAIT = [
    aten.maximum.default,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.pow.Tensor_Tensor,
    aten.special_zeta.default,
    aten.igamma.default,
    aten.lerp.Tensor,
    aten.addcdiv.default,
    aten.polar.default,
    aten._prelu_kernel.default,
]


def first_and_second_gradients(loss: Tensor, leaves: list[Tensor], masks: list[Tensor]) -> list[Tensor]:
    """The loss, and its gradients where the leaves are valid; zero where an operator has none for a leaf."""
    found = [loss.detach()]
    for _ in range(2):
        if not loss.requires_grad:
            break
        seen = []
        for leaf, mask in zip(leaves, masks, strict=True):
            if not leaf.requires_grad:
                seen.append(torch.zeros_like(leaf))
                continue
            try:
                (grad,) = torch.autograd.grad(loss, leaf, create_graph=True, materialize_grads=True)
            except RuntimeError as error:  # igamma, for one, has no derivative for its first operand
                if "not implemented" not in str(error):
                    raise
                grad = torch.zeros_like(leaf)
            seen.append(torch.where(mask, grad, 0))
        found += [grad.detach() for grad in seen]
        loss = torch.stack([grad.sum() for grad in seen]).sum()
    return found


SHAPES = {"same shape": ((7,), (7,), (7,)), "row and column": ((3, 1), (4,), (3, 4)), "0-d": ((7,), (), (7,))}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning")  # torch's own, 2.15
@pytest.mark.parametrize("op", OF_EACH_TRAIT, ids=lambda op: op.name().removeprefix("aten::"))
def test_gradients_are_those_of_the_valid_elements(op: Any) -> None:
    for name, shapes in SHAPES.items():
        if name != "same shape" and op is aten._prelu_kernel.default:
            continue  # it does not broadcast
        random = torch.Generator().manual_seed(0)
        least = 1.2 if op is aten.special_zeta.default else 0.2
        values = [torch.rand(s, generator=random, dtype=torch.float64) * 0.6 + least for s in shapes[: operands(op)]]
        # The last operand is plain: its gradient is a sum over all that it meets.
        masks = [torch.rand(x.shape, generator=random) < 0.6 for x in values]
        masks[-1].fill_(True)
        everywhere = torch.stack(torch.broadcast_tensors(*masks)).all(0)

        leaves = [x.clone().requires_grad_() for x in values]
        args, kwargs = sample(op, [leaf.expand(everywhere.shape)[everywhere] for leaf in leaves])
        expected = first_and_second_gradients(op(*args, **kwargs).sum().real, leaves, masks)

        first: list[Tensor] = []
        for garbage in (NAN, INF, -INF, 0.0, -1.0, 1e300):
            leaves = [torch.where(m, x, garbage) for x, m in zip(values, masks, strict=True)]
            leaves = [leaf.requires_grad_() for leaf in leaves]
            records = [Dense(x, None if m.all() else as_int8(m)) for x, m in zip(leaves, masks, strict=True)]
            args, kwargs = sample(op, records)
            found = first_and_second_gradients(total(apply(op, *args, **kwargs)).real, leaves, masks)
            first = first or found
            for mine, right, before in zip(found, expected, first, strict=True):
                torch.testing.assert_close(mine, right, msg=lambda text, name=name: f"{name}: {text}")
                assert torch.equal(mine, before), f"{name}: {garbage} under the mask shows"


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


# ---------------------------------------------------------------------------------------------- copies and casts


def test_casts_keep_the_mask_and_take_it_along() -> None:
    x = masked([1.5, NAN], [1, 0])
    assert shown(apply(aten._to_copy.default, x, dtype=torch.int64)) == [1, "--"]
    elsewhere = apply(aten._to_copy.default, x, device=torch.device("meta"))
    assert elsewhere.data.device == elsewhere.validity.device == torch.device("meta")
    mantissa, exponent = apply(aten.frexp.Tensor, masked([8.0, NAN], [1, 0]))
    assert shown(mantissa) == [0.5, "--"]
    assert shown(exponent) == [4, "--"]


# --------------------------------------------------------------------------------------------------- activations


def test_glu_needs_both_halves() -> None:
    x = masked([2.0, 3.0, NAN, 0.0, NAN, 0.0], [1, 1, 0, 1, 0, 1], requires_grad=True)
    result = apply(aten.glu.default, x)
    assert shown(result) == [1.0, "--", "--"]
    assert gradient(x, total(result)) == [0.5, 0.0, "--", 0.5, "--", 0.0]


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


def test_foreach_norm_is_over_valid_elements() -> None:
    three, nothing = apply(aten._foreach_norm.Scalar, [masked([3.0, NAN], [1, 0]), masked([NAN], [0])], 2)
    assert shown(three) == [3.0]
    assert shown(nothing) == ["--"]


def test_foreach_powsum_is_over_valid_elements() -> None:
    x, nothing = masked([3.0, NAN, -1.0], [1, 0, 1], requires_grad=True), masked([NAN], [0])
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
