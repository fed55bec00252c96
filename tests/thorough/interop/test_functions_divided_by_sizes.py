"""Functions that torch writes in Python around its operators, and that divide by a size or ask about every element.

The size is the number of what is valid, and where nothing is valid `any` is False and `all` True. The laws ask it of
the losses in every storage; here are lp_pool, modes, modules, and rules inside functions of one's own.
"""

from __future__ import annotations

import contextlib
import inspect
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import masked_dispatch as md
from op_registry import registry
from op_registry.authoring import COMPOSITE, inside
from storages import STORAGES

NAN = float("nan")
REDUCTIONS = ("none", "mean", "sum")


def masked(values: Tensor, mask: Tensor, garbage: float = NAN) -> md.MaskedTensor:
    return md.masked_tensor(torch.where(mask, values, garbage), mask)


ROWS = torch.tensor([[True, True, False], [False, False, False], [True, False, False]])


def batch(requires_grad: bool = False) -> Tensor:
    return torch.arange(1.0, 10.0).reshape(3, 3).div(10).requires_grad_(requires_grad)


# -------------------------------------------------------------------------------------------------------- kl_div


def batchmean(x: Tensor, target: Tensor) -> Tensor:
    return F.kl_div(x, target, reduction="batchmean")


def test_batchmean_of_rows_that_broadcast() -> None:
    x, target = masked(batch()[:1], ROWS[:1]), torch.full((3, 3), 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        total = F.kl_div(x, target, reduction="sum")
        torch.testing.assert_close(batchmean(x, target).item(), total.item())  # one row of the input


# ---------------------------------------------------------------------------------- multilabel_soft_margin_loss


def test_the_examples_of_one_row() -> None:
    x = masked(torch.tensor([[1.0, 9.0]]), torch.tensor([[True, False]]))
    assert F.multilabel_soft_margin_loss(x, torch.zeros(1, 2)).item() == pytest.approx(1.3133, abs=1e-4)
    x = masked(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([[True, True, False, False]]))
    target = torch.tensor([[1.0, 0.0, 1.0, 0.0]])
    assert F.multilabel_soft_margin_loss(x, target).item() == pytest.approx(1.2201, abs=1e-4)


# ------------------------------------------------------------- lp_pool, which torch's database does not call

POOLS = {1: F.lp_pool1d, 2: F.lp_pool2d, 3: F.lp_pool3d}


LP_MODULES = {1: nn.LPPool1d, 2: nn.LPPool2d, 3: nn.LPPool3d}


def half_valid(spatial: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(spatial)
    shape = (2, 2, *[5] * spatial)
    mask = torch.rand(shape) < 0.5
    mask[0, 0] = False
    return torch.rand(shape) + 0.5, mask


@pytest.mark.parametrize("storage", STORAGES)
def test_an_lp_window_is_over_its_valid_elements(storage: str) -> None:
    x = STORAGES[storage](masked(torch.tensor([[1.0, 9.0]]), torch.tensor([[True, False]])))
    assert F.lp_pool1d(x, 2.0, 2).item() == 1.0


@pytest.mark.parametrize("spatial", [1, 2, 3])
@pytest.mark.parametrize("norm", [1.0, 2.0, 3.0])
@pytest.mark.parametrize(("stride", "ceil_mode"), [(None, False), (1, False), (2, True)])
def test_lp_pooling_sums_powers_of_what_is_valid(
    spatial: int, norm: float, stride: int | None, ceil_mode: bool
) -> None:
    values, mask = half_valid(spatial)
    found = POOLS[spatial](masked(values, mask), norm, 2, stride, ceil_mode)
    # A zero adds nothing to a sum of powers, so plain torch on zeros is the oracle.
    expected = POOLS[spatial](torch.where(mask, values, 0), norm, 2, stride, ceil_mode)
    valid = POOLS[spatial](mask.float(), 1.0, 2, stride, ceil_mode) > 0
    assert torch.equal(found.get_mask(), valid)
    torch.testing.assert_close(found.to_tensor(0), torch.where(valid, expected, 0))
    again = LP_MODULES[spatial](norm, 2, stride, ceil_mode)(masked(values, mask, -1e30))
    assert torch.equal(again, found)


@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_lp_pooling_without_a_mask_is_torchs(spatial: int) -> None:
    values, _ = half_valid(spatial)
    expected = POOLS[spatial](values, 2.0, 2, 2, True)
    assert torch.equal(POOLS[spatial](md.masked_tensor(values, None), 2.0, 2, 2, True).get_data(), expected)


@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_the_gradient_of_lp_pooling(spatial: int) -> None:
    values, mask = half_valid(spatial)
    x, alone = values.clone().requires_grad_(), values.clone().requires_grad_()
    POOLS[spatial](md.as_masked_tensor(x, mask), 2.0, 2).sum().backward()
    powers = POOLS[spatial](torch.where(mask, alone, 0) ** 2, 1.0, 2)
    torch.where(powers > 0, torch.where(powers > 0, powers, 1).sqrt(), 0).sum().backward()
    torch.testing.assert_close(x.grad, alone.grad)


# --------------------------------------------------------------------------------------------- questions of nothing


@pytest.mark.parametrize("storage", ["dense", "coo", "csr", "packed"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_gaussian_loss_of_nothing_is_invalid(storage: str, reduction: str) -> None:
    nothing = STORAGES[storage](masked(torch.ones(3, 2), torch.zeros(3, 2, dtype=torch.bool)))
    loss = F.gaussian_nll_loss(torch.randn(3, 2), torch.randn(3, 2), nothing, reduction=reduction)
    assert not loss.get_mask().any()
    assert not nn.GaussianNLLLoss(reduction=reduction)(torch.randn(3, 2), torch.randn(3, 2), nothing).get_mask().any()


def test_a_gaussian_loss_of_nothing_has_a_gradient_of_zeros() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    F.gaussian_nll_loss(x, torch.randn(3, 2), masked(torch.ones(3, 2), torch.zeros(3, 2, dtype=torch.bool))).backward()
    assert torch.equal(x.grad, torch.zeros(3, 2))


def test_a_negative_variance_is_found_where_it_is_valid_and_not_elsewhere() -> None:
    variance, mask = torch.tensor([[1.0, -1.0]]), torch.tensor([[True, False]])
    F.gaussian_nll_loss(torch.zeros(1, 2), torch.zeros(1, 2), md.masked_tensor(variance, mask))
    with pytest.raises(ValueError, match="var has negative entry"):
        F.gaussian_nll_loss(torch.zeros(1, 2), torch.zeros(1, 2), md.masked_tensor(variance, ~mask))


@pytest.mark.parametrize("storage", ["dense", "coo", "csr", "packed"])
def test_distributions_accept_parameters_and_samples_of_which_nothing_is_valid(storage: str) -> None:
    nothing = STORAGES[storage](masked(torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool)))
    normal = torch.distributions.Normal(nothing, nothing, validate_args=True)
    assert not normal.log_prob(nothing).get_mask().any()
    assert not torch.distributions.Bernoulli(logits=nothing, validate_args=True).entropy().get_mask().any()


@pytest.mark.parametrize("mask", [[False, False], [True, False]])
def test_a_draw_by_rejection_ends(mask: list[bool]) -> None:
    """torch draws until every sample is accepted, and asks first whether any is: of nothing, none would ever be."""
    torch.manual_seed(0)
    concentration = md.masked_tensor(torch.tensor([2.0, float("nan")]), torch.tensor(mask))
    draws = torch.distributions.VonMises(torch.zeros(2), concentration, validate_args=False).sample((3,))
    assert draws.get_mask().tolist() == [mask] * 3
    assert bool((draws.to_tensor(0.0).abs() <= torch.pi).all())


def test_distributions_still_refuse_what_is_wrong_where_it_is_valid() -> None:
    scale = md.masked_tensor(torch.tensor([-1.0, -1.0]), torch.tensor([True, False]))
    with pytest.raises(ValueError, match="Expected parameter scale"):
        torch.distributions.Normal(torch.zeros(2), scale, validate_args=True)


def test_code_of_callers_is_asked_for_an_answer() -> None:
    nothing = masked(torch.ones(2), torch.zeros(2, dtype=torch.bool))
    assert not (nothing < 0).any().get_mask().item()
    with pytest.raises(md.InvalidValueError, match="it is invalid"):
        bool((nothing < 0).any())


# ------------------------------------------------------------------------------------------------------- other modes


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch's own, of kl_div under vmap
@pytest.mark.parametrize("call", [lambda x: batchmean(x, torch.full((3, 3), 0.5)), nn.LPPool1d(2.0, 2, 1)])
def test_mapped_as_one_by_one(call: Callable[[Tensor], Tensor]) -> None:
    values, masks = torch.stack([batch(), batch() + 1]), torch.stack([ROWS, ROWS.flip(0)])
    found = md.functional.vmap(call)(masked(values, masks))
    for n in range(2):
        assert torch.equal(found[n], call(masked(values[n], masks[n])))


FIRST_TRACE = """
import torch, masked_dispatch as md
data, mask = torch.ones(1, 1, 1, 2), torch.tensor([[[[True, False]]]])
pool = {pool}
assert torch.compile(pool, backend="aot_eager", fullgraph=True)(*{arguments}).item() == 1.0
"""
FIRST_CALLS = {
    "of an argument": ("lambda x: torch.nn.functional.lp_pool3d(x, 2.0, (1, 1, 2))", "[md.masked_tensor(data, mask)]"),
    "of a tensor made inside": (
        "lambda d, m: torch.nn.functional.lp_pool3d(md.as_masked_tensor(d, m), 2.0, (1, 1, 2))",
        "[data, mask]",
    ),
}


@pytest.mark.parametrize("call", FIRST_CALLS)
def test_the_first_function_that_is_traced_in_a_process(call: str) -> None:
    pool, arguments = FIRST_CALLS[call]
    script = FIRST_TRACE.format(pool=pool, arguments=arguments)
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


# ------------------------------------------------------------------------------------------ the table, and your own


def divided_by_size(x: Tensor) -> Tensor:
    """A function of somebody's, which could not be changed."""
    return x.sum(0) / x.size(0)


@contextlib.contextmanager
def a_mean_inside(function: Callable[[Tensor], Tensor]) -> Iterator[Any]:
    """Within the block, a sum inside the function is the mean, times the size."""

    @inside(function, torch.ops.aten.sum.dim_IntList, category=COMPOSITE)
    def scaled_mean(self: Tensor, dim: list[int], keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
        return self.mean(dim, keepdim, dtype=dtype) * self.shape[dim[0]]

    try:
        yield scaled_mean
    finally:
        registry.remove_inside(scaled_mean)


def two_of_three() -> Tensor:
    return masked(torch.tensor([2.0, 4.0, 6.0]), torch.tensor([True, False, True]))


def test_a_rule_inside_a_function_of_your_own() -> None:
    x = two_of_three()
    assert divided_by_size(x).item() == pytest.approx(8 / 3)
    with a_mean_inside(divided_by_size) as scaled_mean:
        assert divided_by_size(x).item() == 4.0
        assert x.sum(0).item() == 8.0
        assert str(scaled_mean).startswith(f"inside {__name__}.divided_by_size: sum (dim_IntList) is composite")
        before = registry.version
        with pytest.raises(ValueError, match=r"divided_by_size.* is already registered; the second rule is at"):
            inside(divided_by_size, torch.ops.aten.sum.dim_IntList, category=COMPOSITE)(lambda self, dim: self)
        assert registry.version == before
    assert divided_by_size(x).item() == pytest.approx(8 / 3)


def test_a_rule_inside_a_function_of_your_own_holds_in_graphs_and_function_modes() -> None:
    def mean_by_size(x: Tensor) -> Tensor:
        return x.sum(0) / x.size(0)

    def call(x: Tensor) -> Tensor:
        return mean_by_size(x)

    x = two_of_three()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    with a_mean_inside(mean_by_size):
        assert compiled(x).item() == 4.0
        with torch.device("cpu"):
            assert mean_by_size(x).item() == 4.0
    assert compiled(x).item() == pytest.approx(8 / 3)


@pytest.mark.parametrize("method", [True, False], ids=["x.sum", "torch.sum"])
def test_a_function_with_a_rule_inside_that_is_compiled_itself(method: bool) -> None:
    """It runs as it is: in a graph of its own nobody would know the function by its frame."""

    def mean_by_size(x: Tensor) -> Tensor:
        return (x.sum(0) if method else torch.sum(x, 0)) / x.size(0)

    with a_mean_inside(mean_by_size):
        compiled = torch.compile(mean_by_size, backend="aot_eager")
        assert [compiled(two_of_three()).item() for _ in range(2)] == [4.0, 4.0]


def test_only_python_functions_have_an_inside() -> None:
    with pytest.raises(TypeError, match="only a function written in Python calls operators"):
        inside(torch.sum, torch.ops.aten.add.Tensor, category=COMPOSITE)


def test_every_rule_inside_a_function_is_about_a_function_that_calls_its_operator() -> None:
    """The source of each function is what its rule was written for: a new torch may have changed it."""
    expected = {
        F.kl_div: "reduced = reduced / input.size()[0]",
        F.multilabel_soft_margin_loss: "loss = loss.sum(dim=class_dim) / C",
        F.lp_pool1d: ".mul(kernel_size)",
        F.lp_pool2d: ".mul(kw * kh)",
        F.lp_pool3d: ".mul(kd * kw * kh)",
        F.gaussian_nll_loss: "elif torch.any(var < 0):",
    }
    changed = [f.__name__ for f, line in expected.items() if line not in inspect.getsource(f)]
    assert changed == []
