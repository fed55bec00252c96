"""A test for each bug around what torch allocates, as it was found, before its fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn

import masked_dispatch as md

NAN = float("nan")
KNOWN = torch.tensor([True, False, True])


def some(*values: float, requires_grad: bool = False) -> md.MaskedTensor:
    """Three numbers, of which the second is invalid, with NaN in its place."""
    return md.masked_tensor(torch.where(KNOWN, torch.tensor(values), NAN), KNOWN, requires_grad=requires_grad)


def shown(t: Tensor) -> list[Any]:
    assert md.is_masked_tensor(t)
    return [v if m else "--" for v, m in zip(t.get_data().flatten().tolist(), t.get_mask().flatten(), strict=True)]


def test_vander_was_plain_with_uninitialised_memory() -> None:
    x = some(2, 0, 3, requires_grad=True)
    assert shown(torch.vander(x.detach())) == [4, 2, 1, "--", "--", 1, 9, 3, 1]
    assert shown(torch.vander(x, 2, increasing=True)) == [1, 2, 1, "--", 1, 3]
    assert torch.vander(x.detach().to(torch.int8), 1).dtype is torch.int64
    torch.vander(x, 3).sum().backward()
    assert shown(x.grad) == [5, "--", 7]
    with pytest.raises(RuntimeError, match="non-negative"):
        torch.vander(x, -1)


@pytest.fixture
def adaptive() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    layer = nn.AdaptiveLogSoftmaxWithLoss(16, 20, [5, 10])
    return layer, torch.randn(4, 16), torch.tensor([1, 6, 12, 3])


def without_second_row(x: Tensor) -> md.MaskedTensor:
    mask = torch.ones(x.shape, dtype=torch.bool)
    mask[1] = False
    return md.masked_tensor(torch.where(mask, x, NAN), mask)


def test_adaptive_softmax_divided_by_rows_that_are_not_there(adaptive: tuple[nn.Module, Tensor, Tensor]) -> None:
    layer, x, target = adaptive
    kept = torch.tensor([0, 2, 3])
    want, got = layer(x[kept], target[kept]), layer(without_second_row(x), target)
    torch.testing.assert_close(got.loss.to_tensor(0), want.loss)
    assert got.output.get_mask().tolist() == [True, False, True, True]
    torch.testing.assert_close(got.output.to_tensor(0)[kept], want.output)
    grads = [torch.autograd.grad(r.loss, list(layer.parameters()), materialize_grads=True) for r in (got, want)]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_log_prob_of_adaptive_softmax_was_plain(adaptive: tuple[nn.Module, Tensor, Tensor], backend: str) -> None:
    layer, x, _ = adaptive
    run = torch.compile(layer.log_prob, backend=backend, fullgraph=True)
    got = run(without_second_row(x))
    assert got.get_mask().sum(1).tolist() == [20, 0, 20, 20]
    kept = torch.tensor([0, 2, 3])
    torch.testing.assert_close(got.to_tensor(0)[kept], layer.log_prob(x)[kept])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_vector_as_triangular_matrix_was_plain(backend: str) -> None:
    run = torch.compile(distributions.utils.vec_to_tril_matrix, backend=backend, fullgraph=True)
    assert shown(run(some(1, 0, 3))) == [1, 0, "--", 3]


def test_correlations_keep_the_mask() -> None:
    transform = distributions.transforms.CorrCholeskyTransform()
    mine, plain = transform(some(0.1, 0, 0.3)), transform(torch.tensor([0.1, 0.2, 0.3]))
    assert mine.get_mask().tolist() == [[True] * 3, [True] * 3, [False, False, True]]
    torch.testing.assert_close(mine[:2].to_tensor(0), plain[:2])


SAMPLED: dict[str, Callable[[Tensor], distributions.Distribution]] = {
    "Exponential": distributions.Exponential,
    "Laplace": lambda p: distributions.Laplace(p, p),
    "Cauchy": lambda p: distributions.Cauchy(p, p),
    "Geometric": distributions.Geometric,
    "Pareto": lambda p: distributions.Pareto(p, p),
    "Weibull": lambda p: distributions.Weibull(p, p),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_samples_by_new_and_new_tensor(name: str) -> None:
    made = SAMPLED[name](some(0.5, 0, 0.25))
    torch.manual_seed(1)
    drawn = made.sample((4,))
    assert drawn.get_mask().equal(KNOWN.expand(4, 3))
    torch.manual_seed(1)
    plain = SAMPLED[name](torch.tensor([0.5, 0.5, 0.25])).sample((4,))
    torch.testing.assert_close(drawn.to_tensor(0)[:, KNOWN], plain[:, KNOWN])
    assert made.log_prob(drawn).get_mask().equal(KNOWN.expand(4, 3))


def test_multinomial_draws_among_the_valid_categories() -> None:
    counts = distributions.Multinomial(40, some(0.5, 0, 0.25)).sample()
    assert counts.get_data()[1] == 0
    assert counts.sum().item() == 40


def test_truncated_normal_initialises_a_masked_parameter() -> None:
    x = nn.init.trunc_normal_(nn.Parameter(some(5, 5, 5)))
    assert x.get_mask().all()
    assert x.get_data().abs().max() <= 2


def test_cross_map_normalisation_runs() -> None:
    mask = torch.ones(1, 4, 2, 2, dtype=torch.bool)
    mask[0, 2, 0, 0] = False
    data = torch.rand(1, 4, 2, 2)
    x = md.masked_tensor(torch.where(mask, data, NAN), mask, requires_grad=True)
    plain = data.clone().requires_grad_()
    got, want = nn.CrossMapLRN2d(3)(x), nn.CrossMapLRN2d(3)(plain)
    complete = torch.ones(1, 4, 2, 2, dtype=torch.bool)
    complete[0, :, 0, 0] = False  # pixels of which every channel is valid
    assert got.get_mask()[complete].all()
    torch.testing.assert_close(got.to_tensor(0)[complete], want[complete])
    got.sum().backward()
    want.sum().backward()
    torch.testing.assert_close(x.grad.to_tensor(0)[complete], plain.grad[complete])


def test_lbfgs_of_a_parameter_without_a_gradient() -> None:
    used, unused = (nn.Parameter(some(1, 1, 1)) for _ in range(2))
    optimizer = torch.optim.LBFGS([used, unused], max_iter=3)

    def loss() -> Tensor:
        optimizer.zero_grad()
        total = (used**2).sum()
        total.backward()
        return total

    optimizer.step(loss)
    assert shown(unused) == [1, "--", 1]
    assert used.detach().abs().amax() < 1e-3


def test_an_operand_of_which_only_the_size_is_read_makes_nothing_invalid() -> None:
    mask = torch.tensor([[[[True, False], [True, True]]]])
    grad = md.masked_tensor(torch.where(mask, torch.ones(1, 1, 2, 2), NAN), mask)
    counted = torch.where(mask, 1.0, 0.0)
    x, w = torch.randn(1, 1, 3, 3), torch.randn(1, 1, 2, 2)
    by_input, by_weight = nn.grad.conv2d_input(x.shape, w, grad), nn.grad.conv2d_weight(x, w.shape, grad)
    for mine, plain in (
        (by_input, nn.grad.conv2d_input(x.shape, w, counted)),
        (by_weight, nn.grad.conv2d_weight(x, w.shape, counted)),
    ):
        assert mine.get_mask().all()
        torch.testing.assert_close(mine.to_tensor(0), plain)
