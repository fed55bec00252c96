"""A test for each bug: those that users reported of masking by hand and of torch.masked, then our own, before their
fix.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import masked_dispatch as md
from few_elements import NAN, X
from few_elements import table as masked

# ----------------------------------------------------------------------------- masking by hand, as users reported it


def test_4132_gradient_of_a_masked_division_is_absent_not_nan() -> None:
    x = torch.tensor([1.0, 1.0], requires_grad=True)
    div = torch.tensor([0.0, 1.0])
    y = md.as_masked_tensor(x / div, div != 0)
    y.sum().backward()
    assert math.isnan(x.grad[0])  # torch's own x / 0 was computed outside: its gradient is 0 · inf
    x.grad = None
    (md.as_masked_tensor(x, div != 0) / div).sum().backward()
    assert x.grad.tolist() == [0.0, 1.0]


def test_1369_adagrad_touches_only_what_has_a_gradient() -> None:
    parameter, state = torch.ones(4), torch.zeros(4)
    gradient = md.masked_tensor(torch.tensor([2.0, NAN, 1.0, NAN]), torch.tensor([True, False, True, False]))
    state.addcmul_(gradient, gradient)
    parameter.addcdiv_(gradient, state.sqrt().add_(1e-10), value=-0.1)
    assert state.tolist() == [4, 0, 1, 0]
    assert parameter.tolist() == pytest.approx([0.9, 1, 0.9, 1])


def test_padding_does_not_leak_into_batch_statistics() -> None:
    tokens = torch.randn(4, 5, 3)
    lengths = torch.tensor([5, 2, 1, 3])
    norm = nn.BatchNorm1d(3)
    padded = md.from_lengths(torch.where((torch.arange(5) < lengths[:, None])[..., None], tokens, NAN), lengths)
    norm(padded.transpose(1, 2))
    alone = torch.cat([tokens[i, : lengths[i]] for i in range(4)])
    torch.testing.assert_close(norm.running_mean, 0.1 * alone.mean(0))
    torch.testing.assert_close(norm.running_var, 0.9 + 0.1 * alone.var(0))


def test_module_moves_and_state_dicts() -> None:
    module = nn.Module()
    module.p = nn.Parameter(masked(X))
    module.register_buffer("b", masked(X))
    module.double()
    assert module.p.dtype is module.b.dtype is torch.float64
    assert isinstance(module.p, nn.Parameter)
    assert md.is_masked_tensor(module.p)
    other = nn.Module()
    other.p = nn.Parameter(md.masked_tensor(torch.zeros(2, 3, dtype=torch.float64)))
    other.register_buffer("b", torch.zeros(2, 3, dtype=torch.float64))
    with pytest.warns(md.MaskDroppedWarning):
        other.load_state_dict(module.state_dict())
    assert other.p.get_mask().tolist() == module.p.get_mask().tolist()
    assert other.b.tolist() == [[1, 2, 0], [4, 0, 6]]  # a plain buffer is updated where values came


# --------------------------------------------------------------------------------------------------- our own bugs


def test_deepcopy_of_a_wrapper_without_an_address() -> None:
    x = nn.Parameter(masked(X))
    x.grad = masked(X)
    y = copy.deepcopy(x)
    assert isinstance(y, nn.Parameter)
    assert y.grad.get_mask().tolist() == x.grad.get_mask().tolist()
    y.detach().zero_()
    assert not x.get_mask().all()


def test_gradient_inside_a_transform_does_not_pass_under_the_mask() -> None:
    data = torch.tensor([1.0, NAN])

    def loss(d: Tensor, w: Tensor) -> Tensor:
        return (md.as_masked_tensor(d, torch.tensor([True, False])) + w).exp().sum().to_tensor(0.0)

    by_data, by_weight = torch.func.grad(loss, (0, 1))(data, torch.zeros(2))
    assert by_data.tolist() == pytest.approx([math.e, 0.0])
    assert by_weight.tolist() == pytest.approx([math.e, 0.0])


def test_trapz_looks_at_intervals_not_at_the_sum_of_all() -> None:
    y = md.masked_tensor(torch.tensor([1.0, 2.0, 4.0, NAN]), torch.tensor([True, True, True, False]))
    assert torch.trapz(y).item() == torch.trapezoid(y).item() == 4.5


def test_dist_between_tensors_of_different_dimensions() -> None:
    y = md.masked_tensor(torch.tensor([3.0, NAN]), torch.tensor([True, False]))
    assert torch.dist(torch.zeros(2, 2), y).item() == pytest.approx(math.sqrt(18))


def test_quantile_of_a_plain_tensor_at_levels_of_which_one_is_invalid() -> None:
    levels = md.masked_tensor(torch.tensor([0.5, NAN]), torch.tensor([True, False]))
    result = torch.quantile(torch.tensor([[1.0, 3.0], [2.0, 6.0]]), levels, dim=1)
    assert result.get_mask().tolist() == [[True, True], [False, False]]
    assert result[0].tolist() == [2.0, 4.0]


def test_fractional_pooling_by_windows_of_which_nobody_knows_where_they_are() -> None:
    samples = md.masked_tensor(torch.full((1, 2, 2), 0.3), torch.tensor([[[True, True], [True, False]]]))
    x = torch.arange(32.0).reshape(1, 2, 4, 4)
    pooled = F.fractional_max_pool2d(x, 2, output_size=2, _random_samples=samples)
    assert pooled.get_mask().flatten(2).all(-1).tolist() == [[True, False]]
    assert torch.equal(pooled.get_mask().flatten(2).any(-1), pooled.get_mask().flatten(2).all(-1))


def test_a_window_with_holes_makes_no_half_known_signal() -> None:
    spectrum = torch.fft.rfft(torch.ones(1, 4, 8)).transpose(1, 2)
    window = md.masked_tensor(torch.ones(8), torch.arange(8) > 0)
    assert torch.istft(spectrum, 8, window=window).count() == 0


def test_a_fraction_as_correction_is_not_rounded_to_the_default_dtype() -> None:
    x = md.masked_tensor(
        torch.tensor([1.0, 2.0, 4.0, 9.0], dtype=torch.float64), torch.tensor([True, True, True, False])
    )
    want = torch.var(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64), 0, correction=1.3)
    assert torch.var(x, 0, correction=1.3).item() == want.item()


def test_covariance_is_of_the_dtype_of_wider_weights() -> None:
    data, weights = torch.tensor([1.0, 2.0, 4.0], dtype=torch.bfloat16), torch.tensor([1.0, 2.0, 1.0])
    x = md.masked_tensor(data, torch.tensor([True, True, False]))
    assert torch.cov(x, aweights=weights).dtype is torch.cov(data, aweights=weights).dtype is torch.float32


def test_blocks_that_meet_a_tensor_in_which_nothing_is_stored() -> None:
    x = md.masked_tensor(torch.ones(4, 4), torch.eye(4) > 0).to_sparse_bsr((2, 2))
    column = md.masked_tensor(torch.ones(4, 1), torch.zeros(4, 1, dtype=torch.bool)).to_sparse_bsr((2, 1))
    assert not (x + column).get_mask().any()


def test_quantiles_of_rows_none_of_which_is_stored() -> None:
    nothing = md.masked_tensor(torch.ones(3, 5), torch.zeros(3, 5, dtype=torch.bool)).to_sparse(1)
    assert torch.quantile(nothing, 0.5, dim=1).get_mask().tolist() == [False] * 3


def test_an_order_in_memory_asked_of_sparse_storage() -> None:
    x = md.masked_tensor(torch.ones(2, 3, 4, 5), torch.rand(2, 3, 4, 5) < 0.5).to_sparse()
    assert x.to(torch.float64, memory_format=torch.channels_last).dtype is torch.float64
    with pytest.raises(RuntimeError, match="required rank 4 tensor to use channels_last format"):
        x[0].to(torch.float64, memory_format=torch.channels_last)


def test_sparse_storage_times_no_columns() -> None:
    x = md.masked_tensor(torch.ones(3, 4), torch.rand(3, 4) < 0.5).to_sparse_csr()
    assert (x @ torch.ones(4, 0)).shape == (3, 0)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_bytes_are_filled_by_all_of_their_bits(dtype: torch.dtype) -> None:
    data = torch.tensor([100, 27, 64, 3], dtype=dtype)
    x = md.masked_tensor(data, torch.tensor([True, True, False, True]))
    assert x.amax().item() == 100
    assert torch.dot(x, torch.tensor([1, 0, 1, 1], dtype=dtype)).item() == 103


def test_integers_plus_a_fraction_of_a_sparse_product() -> None:
    x = md.masked_tensor(torch.full((3, 4), 2), torch.eye(3, 4) > 0)
    bias, other = torch.full((3, 5), 7), torch.ones(4, 5, dtype=torch.int64)
    dense, stored = (torch.addmm(bias, m, other, beta=0.2, alpha=1.6) for m in (x, x.to_sparse_csr()))
    assert dense.dtype is torch.int64
    md.testing.assert_close(stored, dense, rtol=0, atol=0)


STORAGES = [torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.jagged]


@pytest.mark.parametrize("layout", STORAGES, ids=str)
@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: (x * w).sum(),
        lambda x, w: (x * w).mean(1).sum(),
        lambda x, w: ((x * w).softmax(-1) * w).sum(),
        lambda x, w: (x * w).amax(0).sum(),
        lambda x, w: (x @ w.expand(2, 3).t()).sum(),
    ],
)
def test_training_on_what_was_evaluated_in_inference_mode(layout, function):
    """What is remembered of a mask there could not be saved for a backward; neither could a clone's mask be."""
    w = torch.ones(3, requires_grad=True)
    x = masked(X).to_layout(layout)
    with torch.inference_mode():
        function(x, w)
        made_there = masked(X).to_layout(layout)
    function(x, w).backward()
    expected, w.grad = w.grad, None
    assert expected.isfinite().all()
    function(made_there.clone(), w).backward()
    assert torch.equal(w.grad, expected)


VIEWS = [
    lambda x: x[0],
    lambda x: x.flatten(),
    lambda x: x.mT,
    lambda x: x.unsqueeze(0),
    lambda x: x.split(1)[0],
    lambda x: next(iter(x)),
    lambda x: x.detach(),
    lambda x: x.expand(2, 2, 3),
    lambda x: x.as_strided((2,), (3,)),
]


@pytest.mark.parametrize(
    ("view", "layout"), [*((view, torch.strided) for view in VIEWS), *((view, torch.sparse_csr) for view in VIEWS[:-1])]
)
def test_views_in_inference_mode_of_what_was_made_outside(view, layout):
    x = masked(X).to_layout(layout)
    with torch.inference_mode():
        found = view(x)
        assert torch.equal(found.to_tensor(0), view(masked(X)).to_tensor(0))
        assert layout is not torch.strided or not found.is_inference()  # as torch has it, of what was made outside
