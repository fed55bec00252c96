"""torch's gradient formulas called by hand: their derivatives, other modes, and small cases with known answers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import masked_dispatch
from aten import aten_overloads
from gradient_formulas import hidden, saved
from masked_dispatch import MaskedSemanticsError, as_masked_tensor, masked_tensor
from op_registry.report.coverage import state_of
from pooled_gradients import pooled_backward, small

aten = torch.ops.aten
MEAN, SUM, NONE = 1, 2, 0


def test_gradients_that_are_not_asked_for_are_none():
    x, grad = masked_tensor(torch.randn(1, 2, 4, 4), torch.rand(1, 2, 4, 4) < 0.8), torch.randn(1, 3, 2, 2)
    geometry = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    _, weight, bias = aten.convolution_backward(grad, x, torch.randn(3, 2, 3, 3), [3], *geometry, [False, True, True])
    assert _ is None
    assert weight.get_mask().all()
    valid = F.conv2d(x, torch.ones(3, 2, 3, 3)).get_mask()
    torch.testing.assert_close(bias.to_tensor(0), torch.where(valid, grad, 0).sum((0, 2, 3)))


@pytest.mark.parametrize("saved_mean_is_known", [True, False])
def test_of_a_slice_whose_statistics_are_invalid_nothing_is_known(saved_mean_is_known):
    x = masked_tensor(torch.randn(3, 4))
    mean, rstd = saved(aten.native_layer_norm, x, [4], None, None, 1e-5)
    known = torch.tensor([[True], [False], [True]])
    if saved_mean_is_known:
        rstd = hidden(rstd.get_data(), known)
    else:
        mean = hidden(mean.get_data(), known)
    result, _, _ = aten.native_layer_norm_backward(x, x, [4], mean, rstd, None, None, [True, False, False])
    assert result.get_mask().equal(known.expand(3, 4))
    plain = aten.native_layer_norm_backward(
        x.get_data(),
        x.get_data(),
        [4],
        *saved(aten.native_layer_norm, x.get_data(), [4], None, None, 1e-5),
        None,
        None,
        [True, False, False],
    )[0]
    torch.testing.assert_close(result.to_tensor(0), torch.where(known, plain, 0))


def test_half_precision_comes_back_as_half_precision():
    mask = torch.rand(3, 8) < 0.7
    x, grad = (masked_tensor(torch.randn(3, 8, dtype=torch.bfloat16), mask) for _ in range(2))
    mean, rstd = saved(aten.native_layer_norm, x, [8], None, None, 1e-5)
    result, _, _ = aten.native_layer_norm_backward(grad, x, [8], mean, rstd, None, None, [True, False, False])
    assert result.dtype is torch.bfloat16
    wide = x.float().requires_grad_()
    F.layer_norm(wide, (8,)).backward(grad.float())
    torch.testing.assert_close(result.float().to_tensor(0), wide.grad.to_tensor(0), atol=5e-2, rtol=5e-2)


# -------------------------------------------------------------------------------- derivatives of them, and other modes


@pytest.mark.parametrize(
    ("formula", "operator"),
    [
        (
            lambda g, x: aten.smooth_l1_loss_backward(g, x, torch.ones_like(x.get_data()), MEAN, 1.0),
            lambda x: F.smooth_l1_loss(x, torch.ones_like(x.get_data())),
        ),
        (lambda g, x: aten._softmax_backward_data(g, x.softmax(-1), -1, torch.float64), lambda x: x.softmax(-1)),
        (
            lambda g, x: aten._log_softmax_backward_data(g, x.log_softmax(-1), -1, torch.float64),
            lambda x: x.log_softmax(-1),
        ),
        (lambda g, x: aten.log_sigmoid_backward(g, x, aten.log_sigmoid_forward(x)[1]), F.logsigmoid),
        (lambda g, x: aten.glu_backward(g, x, -1), F.glu),
        (
            lambda g, x: aten.native_layer_norm_backward(
                g, x, [4], *saved(aten.native_layer_norm, x, [4], None, None, 1e-5), None, None, [True, False, False]
            )[0],
            lambda x: F.layer_norm(x, (4,)),
        ),
        (
            lambda g, x: aten.max_pool2d_with_indices_backward(
                g, x[None], [1, 2], [1, 2], [0, 0], [1, 1], False, aten.max_pool2d_with_indices(x[None], [1, 2])[1]
            )[0],
            lambda x: F.max_pool2d(x[None], (1, 2))[0],
        ),
    ],
    ids=["smooth_l1_loss", "softmax", "log_softmax", "log_sigmoid", "glu", "layer_norm", "max_pool2d"],
)
def test_the_derivative_of_a_formula_is_the_second_derivative(formula, operator):
    torch.manual_seed(1)
    mask = torch.rand(3, 4, 4) < 0.7
    data = torch.randn(3, 4, 4, dtype=torch.float64)
    first, second = (hidden(data, mask).detach().requires_grad_() for _ in range(2))
    out = operator(first)
    grad = torch.randn(out.shape, dtype=torch.float64)
    g1, g2 = (hidden(grad, out.get_mask()).detach().requires_grad_() for _ in range(2))
    (by_autograd,) = torch.autograd.grad(out, first, g1, create_graph=True)
    by_formula = formula(g2, second)
    torch.testing.assert_close(by_formula.to_tensor(0), by_autograd.to_tensor(0))
    weights = torch.randn(data.shape, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad((by_autograd * weights).sum(), [g1, first], allow_unused=True),
        torch.autograd.grad((by_formula * weights).sum(), [g2, second], allow_unused=True),
        strict=True,
    ):
        zero = torch.zeros(())
        torch.testing.assert_close(*(zero.expand(data.shape) if t is None else t.to_tensor(0).float() for t in (a, b)))


def test_under_vmap_and_in_inference_mode():
    grad, x = small()
    each = pooled_backward(grad, x)
    stacked = masked_dispatch.functional.vmap(pooled_backward)(torch.stack([grad, grad]), torch.stack([x, x]))
    assert stacked[1].get_mask().equal(each.get_mask())
    torch.testing.assert_close(stacked[1].to_tensor(0), each.to_tensor(0))
    with torch.inference_mode():
        inside = pooled_backward(*small())
    torch.testing.assert_close(inside.to_tensor(0), each.to_tensor(0))


# ------------------------------------------------------------------------------------------------- elementwise formulas


def test_pointwise_formulas_need_all_of_their_operands():
    a, b = torch.tensor([True, True, False]), torch.tensor([True, False, True])
    grad, x = hidden(torch.tensor([1.0, 2.0, 3.0]), a), hidden(torch.tensor([-1.0, 2.0, 3.0]), b)
    results = {
        aten.threshold_backward: aten.threshold_backward(grad, x, 0),
        aten.log_sigmoid_backward: aten.log_sigmoid_backward(grad, x, aten.log_sigmoid_forward(x)[1]),
        aten.rrelu_with_noise_backward: aten.rrelu_with_noise_backward(grad, x, torch.ones(3), 0.1, 0.1, True, False),
    }
    plain = {
        aten.threshold_backward: 0.0,
        aten.log_sigmoid_backward: 1 - torch.sigmoid(torch.tensor(-1.0)).item(),
        aten.rrelu_with_noise_backward: 1.0,
    }
    for op, result in results.items():
        assert result.get_mask().tolist() == [True, False, False], op
        assert result[0].item() == pytest.approx(plain[op]), op


# ------------------------------------------------------------------------------------------------- linear, and look-ups


@pytest.mark.parametrize("name", ["nearest1d", "linear1d", "bilinear2d", "bicubic2d"])
def test_what_came_to_an_interpolation_adds_up_in_elements_that_are_all_valid(name):
    spatial = int(name[-2])
    mask = torch.rand(1, 2, *[6] * spatial) < 0.6
    grad = torch.randn(mask.shape)
    sizes = [[6] * spatial, [1, 2, *[3] * spatial], *([] if "nearest" in name else [False])]
    op = getattr(aten, f"upsample_{name}_backward")
    result = op(hidden(grad, mask), *sizes)
    assert result.get_mask().all()
    torch.testing.assert_close(result.to_tensor(0), op(torch.where(mask, grad, 0), *sizes))


@pytest.mark.parametrize("padding_idx", [-1, 2])
@pytest.mark.parametrize("by_frequency", [False, True])
def test_rows_of_an_embedding_get_what_came_to_valid_indices(padding_idx, by_frequency):
    indices = torch.tensor([[0, 2, 1], [1, 0, 1]])
    asked = torch.tensor([[True, True, False], [True, True, True]])
    grad = torch.randn(2, 3, 4)
    known = torch.rand(2, 3, 4) < 0.7
    table = torch.zeros(5, 4)
    for row in range(5):
        if row != padding_idx:
            here = asked & (indices == row)
            table[row] = torch.where(known, grad, 0)[here].sum(0) / (here.sum().clamp(min=1) if by_frequency else 1)
    result = aten.embedding_dense_backward(hidden(grad, known), hidden(indices, asked), 5, padding_idx, by_frequency)
    assert result.get_mask().all()
    torch.testing.assert_close(result.to_tensor(0), table)


def bags(mode, weights=None):
    weight, indices, offsets = torch.randn(6, 3), torch.tensor([1, 2, 4, 1, 3]), torch.tensor([0, 2])
    _, offset2bag, bag_size, maximum = aten._embedding_bag(weight, indices, offsets, False, mode, False, weights)
    return weight, indices, offsets, offset2bag, bag_size, maximum


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_rows_of_bags_get_what_came_to_the_bags(mode):
    weight, *kept = bags(mode)
    grad, known = torch.randn(2, 3), torch.tensor([[True, False, True], [True, True, False]])
    filled = torch.where(known, grad, 0)
    options = (6, False, mode, False, None)
    result = aten._embedding_bag_backward(hidden(grad, known), *kept, *options)
    assert result.get_mask().all()
    assert result.to_tensor(0).equal(aten._embedding_bag_backward(filled, *kept, *options))
    if mode == 0:
        arguments = (kept[0], kept[1], kept[2], mode)
        factors = aten._embedding_bag_per_sample_weights_backward(
            hidden(grad, known), masked_tensor(weight), *arguments
        )
        assert factors.to_tensor(0).equal(aten._embedding_bag_per_sample_weights_backward(filled, weight, *arguments))


def test_bags_of_which_nothing_is_known_are_refused():
    _, indices, *kept = bags(0)
    grad = masked_tensor(torch.randn(2, 3), torch.tensor([[True], [False]]))
    options = (6, False, 0)
    with pytest.raises(
        MaskedSemanticsError, match=r"indices \(of shape \(5,\)\) is partly invalid: it is unknown which"
    ):
        aten._embedding_bag_backward(grad, hidden(indices, indices != 4), *kept, *options, False, None)
    with pytest.raises(
        MaskedSemanticsError, match=r"sparse=True: its gradient cannot be stored sparsely yet\. Use sparse=False"
    ):
        aten._embedding_bag_backward(grad, indices, *kept, *options, True, None)


@pytest.mark.parametrize("name", ["grid_sampler_2d_backward", "_grid_sampler_2d_cpu_fallback_backward"])
def test_grid_sampler_backward_is_the_gradient(name):
    torch.manual_seed(0)
    grad, x, grid = torch.randn(1, 1, 2, 2), torch.randn(1, 1, 3, 3), torch.rand(1, 2, 2, 2)
    formula, options = getattr(aten, name), (0, 0, False)
    wanted = ([True, True],) if name == "grid_sampler_2d_backward" else ()
    mine = formula(masked_tensor(grad), x, grid, *options, *wanted)
    for a, b in zip(mine, formula(grad, x, grid, *options, *wanted), strict=True):
        assert a.to_tensor(0).equal(b)
    mask = torch.tensor([True, True, False])
    holey, points = masked_tensor(x, mask.expand(x.shape)).requires_grad_(), grid.clone().requires_grad_()
    sampled = aten.grid_sampler_2d(holey, points, *options)
    expected = torch.autograd.grad(sampled, (holey, points), grad)
    mine = formula(grad, holey.detach(), grid, *options, *wanted)
    for a, b in zip(mine, expected, strict=True):
        torch.testing.assert_close(as_masked_tensor(a).to_tensor(0), as_masked_tensor(b).to_tensor(0))


# Storage that masked tensors do not have, cells that torch takes apart before they could be called, and stubs.
ELSEWHERE = ("mkldnn", "nested", "sparse", "_thnn_", "fake_quantize", "overrideable")


def test_every_gradient_formula_that_runs_here_is_served():
    missing = {
        str(op)
        for op in aten_overloads()
        if op._schema.name.rpartition("_backward")[1]
        and not op._schema.is_mutable
        and op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CPU)
        and not any(word in str(op) for word in ELSEWHERE)
        and state_of(op) == "missing"
    }
    assert not missing
