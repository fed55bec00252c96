"""Normalisation on bare records: against loops over compressed slices; running statistics; dtypes under autocast."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bare_records import apply
from op_registry.authoring import Dense

aten = torch.ops.aten
EPS = 1e-5


def parameter(*size: int) -> Tensor:
    return torch.linspace(0.5, 1.5, math.prod(size), dtype=torch.float64).reshape(size).requires_grad_()


def masked(shape: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Data, and a mask with an empty slice, a slice of one, and a full one, whichever way one looks."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(shape, generator=generator, dtype=torch.float64)
    mask = torch.rand(shape, generator=generator) < 0.6
    mask[0, 0] = False
    mask[-1, -1] = True
    mask[0, 1] = False
    mask[0, 1].view(-1)[0] = True
    return data, mask


def by_hand(x: Tensor, mask: Tensor, slices: Tensor, weight: Tensor, bias: Tensor, f) -> Tensor:
    """`f` on the compressed elements of each slice; `slices` numbers the slice of each element."""
    result = torch.zeros_like(x)
    for number in slices.unique():
        chosen = (slices == number) & mask
        if chosen.any():
            result = result.masked_scatter(chosen, f(x[chosen]))
    return result * weight + bias


def standard(t: Tensor) -> Tensor:
    return (t - t.mean()) * (t.var(correction=0) + EPS).rsqrt()


def root_mean_square(t: Tensor) -> Tensor:
    return t * (t.square().mean() + EPS).rsqrt()


def numbered(shape: tuple[int, ...], dims: tuple[int, ...]) -> Tensor:
    """The number of the slice over `dims` that each element belongs to."""
    kept = [1 if d in dims else n for d, n in enumerate(shape)]
    return torch.arange(math.prod(kept)).reshape(kept).expand(shape)


def check(rule, hand, x: Tensor, mask: Tensor, parameters: list[Tensor]) -> None:
    """Values, gradients and second derivatives for input and parameters, whatever lies under the mask."""
    before = None
    inputs = [x.clone().requires_grad_(), *parameters]
    wanted = derivatives(torch.where(mask, hand(*inputs), 0), inputs, mask)
    for value in (math.nan, math.inf, -1e38):
        inputs = [torch.where(mask, x, value).requires_grad_(), *parameters]
        result = rule(Dense(inputs[0], mask.to(torch.int8)), *map(Dense, parameters))
        shown = result.valid.expand(x.shape)
        assert shown.equal(mask)
        assert result.data.isfinite().all()
        got = derivatives(torch.where(shown, result.data, 0), inputs, mask)
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b)
        assert before is None or all(a.equal(b) for a, b in zip(got, before, strict=True))
        before = got


def derivatives(output: Tensor, inputs: list[Tensor], mask: Tensor) -> list[Tensor]:
    weights = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).reshape(output.shape)
    first = torch.autograd.grad((output * weights + output**2).sum(), inputs, create_graph=True)
    first = [torch.where(mask, first[0], 0), *first[1:]]
    loss = sum((g * torch.linspace(1, 2, g.numel(), dtype=g.dtype).reshape(g.shape)).sum() for g in first)
    second = torch.autograd.grad(loss, inputs)
    return [output.detach(), *(g.detach() for g in first), torch.where(mask, second[0], 0), *second[1:]]


def test_layer_norm():
    x, mask = masked((3, 4, 5))
    for shape in ((5,), (4, 5)):
        slices = numbered(x.shape, tuple(range(3 - len(shape), 3)))
        check(
            lambda x, w, b, shape=shape: apply(aten.layer_norm.default, x, shape, w, b, EPS),
            lambda x, w, b, slices=slices: by_hand(x, mask, slices, w, b, standard),
            x,
            mask,
            [parameter(*shape), parameter(*shape)],
        )


def test_rms_norm():
    x, mask = masked((3, 4, 5))
    check(
        lambda x, w: apply(aten.rms_norm.default, x, (5,), w, EPS),
        lambda x, w: by_hand(x, mask, numbered(x.shape, (2,)), w, torch.zeros(5), root_mean_square),
        x,
        mask,
        [parameter(5)],
    )


def test_group_norm():
    x, mask = masked((2, 6, 3))
    groups = numbered((2, 2, 3, 3), (2, 3)).reshape(2, 6, 3)
    check(
        lambda x, w, b: apply(aten.group_norm.default, x, 2, w, b, EPS),
        lambda x, w, b: by_hand(x, mask, groups, w[:, None], b[:, None], standard),
        x,
        mask,
        [parameter(6), parameter(6)],
    )


def test_instance_norm():
    x, mask = masked((2, 3, 5))
    check(
        lambda x, w, b: apply(aten.instance_norm.default, x, w, b, None, None, True, 0.1, EPS, False),
        lambda x, w, b: by_hand(x, mask, numbered(x.shape, (2,)), w[:, None], b[:, None], standard),
        x,
        mask,
        [parameter(3), parameter(3)],
    )


def test_batch_norm():
    x, mask = masked((4, 3, 2))
    mask[:, 0] = False
    check(
        lambda x, w, b: apply(aten.batch_norm.default, x, w, b, None, None, True, 0.1, EPS, False),
        lambda x, w, b: by_hand(x, mask, numbered(x.shape, (0, 2)), w[:, None], b[:, None], standard),
        x,
        mask,
        [parameter(3), parameter(3)],
    )
    mean, var = parameter(3).detach(), parameter(3).detach()
    check(
        lambda x, w, b: apply(aten.batch_norm.default, x, w, b, Dense(mean), Dense(var), False, 0.1, EPS, False),
        lambda x, w, b: F.batch_norm(x, mean, var, w, b, False, 0.1, EPS),
        x,
        mask,
        [parameter(3), parameter(3)],
    )


def test_running_statistics_move_by_what_is_valid():
    x = torch.tensor([[1.0, 5.0, 2.0], [3.0, math.nan, math.inf], [8.0, math.nan, 4.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 0, 0]], dtype=torch.int8)
    for op in (aten.batch_norm.default, aten.native_batch_norm.default, aten._native_batch_norm_legit.default):
        mean, var = torch.tensor([10.0, 20.0, 30.0]), torch.tensor([1.0, 2.0, 3.0])
        rest = (True, 0.5, EPS, False)[: len(op._schema.arguments) - 5]
        apply(op, Dense(x, mask), None, None, Dense(mean), Dense(var), *rest)
        # All of the first channel, one element of the second, none of the third.
        assert mean.tolist() == [7.0, 12.5, 30.0]
        assert var.tolist() == [7.0, 2.0, 3.0]
    mean, var = torch.tensor([10.0, 20.0, 30.0]), torch.tensor([1.0, 2.0, 3.0])
    invalid = torch.tensor([0, 1, 1], dtype=torch.int8)
    apply(aten.batch_norm.default, Dense(x, mask), None, None, Dense(mean, invalid), Dense(var), True, 0.5, EPS, False)
    assert mean.tolist() == [10.0, 12.5, 30.0]
    op = aten._native_batch_norm_legit_functional.default
    *_, new_mean, new_var = apply(op, Dense(x, mask), None, None, Dense(mean), Dense(var), True, 0.5, EPS)
    assert (new_mean.data[1].item(), mean.tolist()) == (8.75, [10.0, 12.5, 30.0])
    assert new_var.data.tolist() == [10.0, 2.0, 3.0]


def test_running_statistics_of_instance_norm_are_means_over_samples_that_have_them():
    x = torch.tensor([[[1.0, 3.0, 9.0]], [[5.0, 0.0, 0.0]], [[0.0, 0.0, 0.0]]])
    mask = torch.tensor([[[1, 1, 0]], [[1, 0, 0]], [[0, 0, 0]]], dtype=torch.int8)
    mean, var = torch.tensor([10.0]), torch.tensor([1.0])
    apply(aten.instance_norm.default, Dense(x, mask), None, None, Dense(mean), Dense(var), True, 0.5, EPS, False)
    assert mean.item() == 0.5 * 10 + 0.5 * (2 + 5) / 2
    assert var.item() == 0.5 * 1 + 0.5 * 2


def test_one_valid_element_gives_the_bias():
    x = torch.tensor([[7.0, math.nan]])
    result = apply(
        aten.batch_norm.default,
        Dense(x, torch.tensor([[1, 0]], dtype=torch.int8)),
        None,
        Dense(torch.tensor([0.25, 0.5])),
        None,
        None,
        True,
        0.1,
        EPS,
        False,
    )
    assert result.data[0, 0] == 0.25
    assert result.valid.tolist() == [[True, False]]


def test_masked_parameters_hide_their_channels():
    x, weight = torch.randn(2, 3, requires_grad=True), torch.tensor([1.0, math.nan, 2.0])
    valid = torch.tensor([1, 0, 1], dtype=torch.int8)
    result = apply(aten.layer_norm.default, Dense(x), (3,), Dense(weight, valid), None, EPS)
    assert result.valid.expand(2, 3).tolist() == [[True, False, True]] * 2
    torch.where(result.valid, result.data, 0).sum().backward()
    assert x.grad.isfinite().all()
    result = apply(aten.batch_norm.default, Dense(x), Dense(weight, valid), None, None, None, True, 0.1, EPS, False)
    assert result.valid.expand(2, 3).tolist() == [[True, False, True]] * 2


def test_everything_valid_is_torch_itself():
    x = torch.randn(3, 4, 5)
    ones = torch.ones(3, 4, 5, dtype=torch.int8)
    calls = [
        (aten.layer_norm.default, ((5,), parameter(5).float(), None, EPS)),
        (aten.native_layer_norm.default, ((5,), None, None, EPS)),
        (aten.rms_norm.default, ((4, 5),)),
        (aten._fused_rms_norm.default, ((5,), None, None)),
        (aten.group_norm.default, (2, None, None, EPS)),
        (aten.native_group_norm.default, (None, None, 3, 4, 5, 2, EPS)),
        (aten.batch_norm.default, (None, None, None, None, True, 0.1, EPS, False)),
        (aten.native_batch_norm.default, (None, None, None, None, True, 0.1, EPS)),
        (aten._native_batch_norm_legit.no_stats, (None, None, True, 0.1, EPS)),
        (aten.instance_norm.default, (None, None, None, None, True, 0.1, EPS, False)),
        (aten.renorm.default, (2, 1, 0.5)),
    ]
    for op, args in calls:
        records = [Dense(a) if isinstance(a, Tensor) else a for a in args]
        for dtype in (torch.float32, torch.bfloat16):
            tolerance = {} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
            expected = op(x.to(dtype), *args)
            for validity in (None, ones):
                actual = apply(op, Dense(x.to(dtype), validity), *records)
                pairs = zip(actual, expected, strict=True) if isinstance(actual, tuple) else [(actual, expected)]
                for a, b in pairs:
                    torch.testing.assert_close(a.data, b, msg=lambda m, op=op: f"{op}: {m}", **tolerance)


def test_shapes_that_do_not_fit_raise_as_in_torch():
    x = Dense(torch.randn(2, 3, 4), torch.ones(2, 3, 4, dtype=torch.int8))
    with pytest.raises(RuntimeError, match="Given normalized_shape"):
        apply(aten.layer_norm.default, x, (5,))
    with pytest.raises(RuntimeError, match="divisible by"):
        apply(aten.group_norm.default, x, 2)
    with pytest.raises(RuntimeError, match="running_mean should contain 3"):
        apply(aten.batch_norm.default, x, None, None, Dense(torch.ones(4)), None, True, 0.1, EPS, False)


def test_renorm_and_weight_norm():
    x = torch.tensor([[3.0, math.nan], [3.0, 4.0], [math.inf, math.nan]], requires_grad=True)
    valid = torch.tensor([[1, 0], [1, 1], [0, 0]], dtype=torch.int8)
    result = apply(aten.renorm.default, Dense(x, valid), 2, 0, 1.0)
    torch.testing.assert_close(torch.where(result.valid, result.data, 0), torch.tensor([[1, 0], [0.6, 0.8], [0, 0]]))
    g = torch.tensor([[2.0], [10.0], [1.0]], requires_grad=True)
    result, norm = apply(aten._weight_norm_interface.default, Dense(x, valid), Dense(g), 0)
    shown = torch.where(result.valid, result.data, 0)
    torch.testing.assert_close(shown, torch.tensor([[2.0, 0], [6, 8], [0, 0]]))
    assert norm.valid.flatten().tolist() == [True, True, False]
    shown.sum().backward()
    torch.testing.assert_close(g.grad.flatten(), torch.tensor([1.0, 1.4, 0.0]))
    assert x.grad.isfinite().all()
