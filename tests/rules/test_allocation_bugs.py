"""A test for each bug around what torch allocates, as it was found, before its fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn
from torch.nn.utils import prune

import masked_dispatch as md
from few_elements import KNOWN, rows_and_classes, without_second_row
from few_elements import dashed as shown
from few_elements import three as some


@pytest.fixture
def adaptive() -> tuple[nn.Module, Tensor, Tensor]:
    return rows_and_classes()


def test_vander_was_plain_with_uninitialised_memory() -> None:
    x = some(2, 0, 3, requires_grad=True)
    assert shown(torch.vander(x.detach())) == [4, 2, 1, "--", "--", 1, 9, 3, 1]
    assert shown(torch.vander(x, 2, increasing=True)) == [1, 2, 1, "--", 1, 3]
    assert torch.vander(x.detach().to(torch.int8), 1).dtype is torch.int64
    torch.vander(x, 3).sum().backward()
    assert shown(x.grad) == [5, "--", 7]
    with pytest.raises(RuntimeError, match="non-negative"):
        torch.vander(x, -1)


# Targets of the head and of each tail, together and all, with each kind of number under the mask.
@pytest.mark.parametrize(
    ("missing", "hidden"), [([0], 7), ([1], 0), ([1], -1), ([1, 2], 1000), ([3], -1), ([0, 3], 0), ([0, 1, 2, 3], 19)]
)
def test_adaptive_softmax_leaves_out_invalid_targets(
    adaptive: tuple[nn.Module, Tensor, Tensor], missing: list[int], hidden: int
) -> None:
    layer, x, target = adaptive
    mask = torch.ones(4, dtype=torch.bool)
    mask[missing] = False
    got = layer(md.as_masked_tensor(x), md.masked_tensor(torch.where(mask, target, hidden), mask))
    assert got.output.get_mask().tolist() == mask.tolist()
    assert bool(got.loss.get_mask()) == bool(mask.any())
    grads = torch.autograd.grad(got.loss, list(layer.parameters()), materialize_grads=True)
    if not mask.any():
        assert not any(grad.any() for grad in grads)
        return
    want = layer(x[mask], target[mask])
    torch.testing.assert_close(got.loss.to_tensor(0), want.loss)
    torch.testing.assert_close(got.output.to_tensor(0)[mask], want.output)
    expected = torch.autograd.grad(want.loss, list(layer.parameters()), materialize_grads=True)
    for mine, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("storage", ["dense", "coo"])
def test_adaptive_softmax_of_one_target(adaptive: tuple[nn.Module, Tensor, Tensor], storage: str) -> None:
    layer, x, _ = adaptive
    x = md.as_masked_tensor(x)
    target = md.masked_tensor(torch.tensor([6, 1, 2, 3]), torch.tensor([False, True, True, True]))
    one = layer(x[0], target[0])
    assert not one.output.get_mask()
    assert not one.loss.get_mask()
    if storage == "coo":
        target = target.to_sparse()
    assert layer(x, target).output.get_mask().tolist() == [False, True, True, True]


def test_what_adaptive_softmax_refuses(adaptive: tuple[nn.Module, Tensor, Tensor]) -> None:
    layer, x, target = adaptive
    with pytest.raises(RuntimeError, match=r"Target values should be in \[0, 19\]"):
        layer(x, md.masked_tensor(torch.tensor([0, 20, 3, 4]), torch.tensor([False, True, True, True])))
    assert torch.equal(layer(x, md.as_masked_tensor(target)).loss, layer(x, target).loss)
    with pytest.raises(md.MaskedSemanticsError, match=r"4 targets are not all valid.*as_masked_tensor\(input\)"):
        layer(x, md.masked_tensor(target, torch.tensor([True, True, False, True])))


def test_predictions_of_adaptive_softmax(adaptive: tuple[nn.Module, Tensor, Tensor]) -> None:
    layer, x, _ = adaptive
    torch.nn.init.normal_(layer.head.weight, std=3.0, generator=torch.Generator().manual_seed(3))
    got = layer.predict(without_second_row(x))
    assert got.get_mask().tolist() == [True, False, True, True]
    assert got.to_tensor(-1)[[0, 2, 3]].tolist() == layer.predict(x[[0, 2, 3]]).tolist()


def test_multinomial_draws_among_the_valid_categories() -> None:
    counts = distributions.Multinomial(40, some(0.5, 0, 0.25)).sample()
    assert counts.get_data()[1] == 0
    assert counts.sum().item() == 40


def test_truncated_normal_initialises_a_masked_parameter() -> None:
    x = nn.init.trunc_normal_(nn.Parameter(some(5, 5, 5)))
    assert x.get_mask().all()
    assert x.get_data().abs().max() <= 2


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


# ----------------------------------------------------------------------------------------------- writes to all of it


def test_fill_by_a_value_that_has_a_gradient() -> None:
    x, value = some(1, 2, 3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    torch.fill(x, value).sum().backward()
    assert shown(x.grad) == [0, "--", 0]
    assert value.grad == 3


def test_an_expanded_tensor_in_a_graph_is_filled_in_its_base() -> None:
    x = some(1, 2, 3, requires_grad=True)
    y = x * 2
    y[None].expand(4, 3).zero_()
    y.sum().backward()
    assert shown(y) == [0, 0, 0]
    assert shown(x.grad) == [0, "--", 0]


@pytest.mark.parametrize(
    "store", [lambda x: x, lambda x: x.to_sparse(), lambda x: x[None].to_packed().without_extent()]
)
def test_copy_takes_a_number(store: Callable[[md.MaskedTensor], md.MaskedTensor]) -> None:
    x = store(some(1, 2, 3))
    assert shown(x.copy_(2.0).to_dense()) == [2, 2, 2]


def test_data_of_one_shape_is_exchanged() -> None:
    x, y = some(1, 2, 3, requires_grad=True), md.masked_tensor(torch.tensor([7.0, 8.0, 9.0]), ~KNOWN)
    view = x.detach()[1:]
    x.data = y
    assert shown(x.detach()) == ["--", 8, "--"]
    assert x.requires_grad
    assert x.is_leaf
    assert shown(view) == ["--", 3]  # of the memory that x had
    y.fill_(5.0)
    assert shown(x.detach()) == [5, 5, 5]
    (x * 2).sum().backward()
    assert shown(x.grad) == [2, 2, 2]
    assert shown(x[:1].detach()) == [5]


def test_pruning_a_masked_parameter() -> None:
    layer = nn.Linear(3, 1, bias=False)
    layer.weight = nn.Parameter(some(1, 2, 3)[None].detach())
    prune.custom_from_mask(layer, "weight", torch.tensor([[1.0, 1.0, 0.0]]))
    assert shown(layer.weight) == [1, "--", 0]
    prune.remove(layer, "weight")
    assert shown(layer.weight) == [1, "--", 0]


FACTORIES: dict[str, Callable[..., Tensor]] = {
    "eye": lambda **k: torch.eye(3, **k),
    "eye of two sizes": lambda **k: torch.eye(3, 3, **k),
    "zeros": lambda **k: torch.zeros(3, 3, **k),
    "ones": lambda **k: torch.ones(3, 3, **k),
    "full": lambda **k: torch.full((3, 3), 2.0, **k),
    "arange": lambda **k: torch.arange(9.0, **k),
    "arange from": lambda **k: torch.arange(1, 10, **k),
    "range": lambda **k: torch.range(1, 9, **k),
    "linspace": lambda **k: torch.linspace(0, 1, 9, **k),
    "logspace": lambda **k: torch.logspace(0, 1, 9, **k),
    "rand": lambda **k: torch.rand(3, 3, **k),
    "randn": lambda **k: torch.randn(3, 3, **k),
    "randint": lambda **k: torch.randint(5, (3, 3), **k),
    "randint from": lambda **k: torch.randint(2, 5, (3, 3), **k),
    "randperm": lambda **k: torch.randperm(9, **k),
    "normal": lambda **k: torch.normal(0.0, 1.0, (3, 3), **k),
}


@pytest.mark.filterwarnings("ignore:torch.range is deprecated")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float64) for name in FACTORIES),
        ("eye", torch.int64),
        ("arange", torch.int64),
        ("rand", torch.int64),
    ],
)
def test_factories_write_to_a_masked_out(name: str, dtype: torch.dtype) -> None:
    make = FACTORIES[name]
    shape = make().shape
    plain = torch.empty(shape, dtype=dtype)
    out = md.masked_tensor(torch.ones(shape, dtype=dtype), torch.rand(shape) < 0.5)
    torch.manual_seed(0)
    try:
        make(out=plain)
    except RuntimeError:  # which torch refuses in this dtype
        with pytest.raises(RuntimeError):
            make(out=out)
        return
    torch.manual_seed(0)
    assert make(out=out) is out
    assert out.get_mask().all()
    assert out.get_data().equal(plain)
    resized = md.masked_tensor(torch.empty(0, dtype=dtype))
    torch.manual_seed(0)
    assert make(out=resized).get_data().equal(plain)
    with pytest.raises(RuntimeError, match=r"doesn't match the broadcast shape|\(resize_\) is refused"):
        make(out=md.masked_tensor(torch.ones(2, dtype=dtype)))


def test_factories_write_to_a_sparse_out() -> None:
    out = some(1, 2, 3).to_sparse()
    assert shown(torch.arange(3.0, out=out).to_dense()) == [0, 1, 2]
    assert out.nnz == 3


def test_identity_initialises_a_masked_parameter() -> None:
    assert shown(nn.init.eye_(md.masked_tensor(torch.ones(2, 2), torch.eye(2) > 0))) == [1, 0, 0, 1]


@pytest.mark.parametrize("stored", [lambda x: x, lambda x: x.to_sparse(2), lambda x: x.to_sparse_csr(dense_dim=1)])
@pytest.mark.parametrize("mask", [None, torch.arange(24).reshape(2, 4, 3) % 5 != 0])
def test_statistics_of_group_norm_have_gradients(mask: Tensor | None, stored: Callable[[Any], Any]) -> None:
    data = torch.randn(2, 4, 3, dtype=torch.float64)
    weights = [torch.randn(s, dtype=torch.float64) for s in ((2, 4, 3), (2, 2), (2, 2))]

    def loss(results: Any) -> Tensor:
        return sum((w * r).sum() for w, r in zip(weights, results, strict=True))

    def by_hand(x: Tensor) -> Any:
        known = torch.ones(2, 2, 6, dtype=torch.bool) if mask is None else mask.reshape(2, 2, 6)
        groups = x.reshape(2, 2, 6)
        n = known.sum(-1, keepdim=True)
        mean = torch.where(known, groups, 0).sum(-1, keepdim=True) / n
        rstd = (torch.where(known, (groups - mean) ** 2, 0).sum(-1, keepdim=True) / n + 1e-5).rsqrt()
        result = torch.where(known, (groups - mean) * rstd, 0).reshape(2, 4, 3)
        return result, mean.reshape(2, 2), rstd.reshape(2, 2)

    x = stored(md.masked_tensor(data, mask)).detach().requires_grad_()
    plain = data.clone().requires_grad_()
    results = torch.native_group_norm(x, None, None, 2, 4, 3, 2, 1e-5)
    assert all(r.requires_grad for r in results)
    loss(results).backward()
    loss(by_hand(plain)).backward()
    torch.testing.assert_close(x.grad.to_tensor(0), plain.grad if mask is None else torch.where(mask, plain.grad, 0))
