"""Masking after a masked operator is as good as masking before it, also where the derivative there is infinite.

Each case has elements at which the logarithm's derivative is infinite, and a mask that leaves them out: before the
logarithm (the reference), or only of the result, by `mask_with`, by another operand or by a missing target.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import masked_dispatch as md

Function = Callable[[Any], Any]

ELEMENTS = torch.tensor([[True, False, True, True], [True, True, False, True], [False, True, True, True]])
ROWS = torch.tensor([[True], [False], [True]]).expand(3, 4)
W = torch.linspace(-1, 2, 20, dtype=torch.float64).view(5, 4)

# Each element of a result is that of one element, so that any may be left out.
BY_ELEMENTS: dict[str, Function] = {
    "exp": torch.exp,
    "chain": lambda x: ((x * 3 + 1).exp() + 1).sqrt().sin(),
    "in place": lambda x: (x * 1).mul_(2).exp_(),
    "transposed": lambda x: x.mT.exp(),
    "unbound": lambda x: torch.stack([row * n for n, row in enumerate(x.unbind(0), 1)]),
    "indexed": lambda x: x[torch.tensor([2, 0, 0, 1])],
    "cat": lambda x: torch.cat([x, x.flip(0)], 1),
    "filled step by step": lambda x: _filled(x),
}
# One row of the result depends on one row.
BY_ROWS: dict[str, Function] = {
    "sum": lambda x: x.sum(1),
    "softmax": lambda x: x.softmax(1),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "linear": lambda x: F.linear(x, W),
    # (of five dimensions: kernels for four, and since 2.15 for three, have no second derivative)
    "attention": lambda x: F.scaled_dot_product_attention(*3 * [x.view(3, 1, 1, 2, 2)]),
}
CASES = [(name, f, ELEMENTS) for name, f in BY_ELEMENTS.items()] + [
    (name, f, ROWS) for name, f in {**BY_ELEMENTS, **BY_ROWS}.items()
]
IDS = [f"{name}, {'rows' if mask is ROWS else 'elements'}" for name, _, mask in CASES]
STORAGES: dict[str, Function] = {
    "dense": lambda x: x,
    "coo": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "packed": lambda x: x.to_packed(),
}


def _filled(x: Any) -> Any:
    buffer = torch.empty_like(x)
    for n in range(3):
        buffer[n] = x[n] * 2
    return buffer


def variable(mask: Tensor) -> Tensor:
    """A leaf whose logarithm has infinite derivatives where `mask` is False."""
    values = torch.linspace(1.1, 2.7, mask.numel(), dtype=torch.float64).view(mask.shape)
    return torch.where(mask, values, 0).requires_grad_()


def gradients(loss: Any, x: Tensor, order: int) -> list[Tensor]:
    """The gradients of the first orders; each is that of the sum of the one before."""
    found = []
    for n in range(order):
        (gradient,) = torch.autograd.grad(loss, x, create_graph=n + 1 < order)
        found.append(gradient.detach())
        loss = (gradient * torch.arange(1.0, 1 + gradient.numel()).view(gradient.shape)).sum()
    return found


def masked_first(f: Function, mask: Tensor, order: int) -> tuple[list[Tensor], Tensor]:
    x = variable(mask)
    result = f(md.as_masked_tensor(x, mask).log())
    return gradients(result.sum(), x, order), result.get_mask()


def masked_later(f: Function, mask: Tensor, of_result: Tensor, order: int, store: Function) -> Any:
    x = variable(mask)
    everywhere = store(md.as_masked_tensor(x, torch.ones_like(mask)))
    return gradients(f(everywhere.log()).mask_with(of_result).sum(), x, order)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(("name", "f", "mask"), CASES, ids=IDS)
def test_as_good_as_masked_before(name: str, f: Function, mask: Tensor, storage: str) -> None:
    order = 2 if storage == "dense" else 1
    expected, of_result = masked_first(f, mask, order)
    with md.densify("always"):
        found = masked_later(f, mask, of_result, order, STORAGES[storage])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


TARGETS = md.masked_tensor(torch.full((3, 4), 0.3, dtype=torch.float64), ELEMENTS)
CLASSES = md.masked_tensor(torch.tensor([0, 1, 2]), ROWS[:, 0])
LOSSES: dict[str, tuple[Function, Tensor]] = {
    "mse": (lambda x: F.mse_loss(x, TARGETS), ELEMENTS),
    "cross_entropy": (lambda x: F.cross_entropy(x, CLASSES), ROWS),
    "sum": (lambda x: (x + TARGETS).sum(), ELEMENTS),
    "product": (lambda x: (x * TARGETS).sum(), ELEMENTS),
    "quotient": (lambda x: (TARGETS / x.exp()).sum(), ELEMENTS),
    "two uses": (lambda x: (x + TARGETS).sum() + (2 * x * TARGETS).sum(), ELEMENTS),
}


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", LOSSES)
def test_what_another_operand_leaves_out(name: str, storage: str) -> None:
    loss, mask = LOSSES[name]
    x, y = variable(mask), variable(mask)
    loss(md.as_masked_tensor(x, mask).log()).backward()
    with md.densify("always"):
        loss(STORAGES[storage](md.as_masked_tensor(y, torch.ones_like(mask))).log()).backward()
    torch.testing.assert_close(y.grad, x.grad, rtol=1e-6, atol=1e-7)


# What a plain operand w gets back has a factor that is infinite where w, or x, is 0.
BESIDE: dict[str, Callable[[Any, Tensor], Any]] = {
    "quotient": lambda x, w: x / w,
    "power": lambda x, w: w ** (x / 4),
    "square root of squares": lambda x, w: torch.hypot(x - x, w),
    "product with an infinity": lambda x, w: (x * (w.detach() > 0)).log() * w * w,
    "twice": lambda x, w: torch.addcdiv(x, x, w) + x / w,
    "through another operator": lambda x, w: (x / (2 * w)).exp(),
}


def beside(name: str, mask: Tensor, wide: bool, store: Function, later: bool) -> list[Tensor]:
    """The gradients of a plain operand, one element for each of x or for each row, masked before or later."""
    w = variable(mask if wide else mask[:, :1])
    valid = torch.ones_like(mask) if later else mask
    x = store(md.masked_tensor(torch.linspace(1, 2, mask.numel(), dtype=torch.float64).view(mask.shape), valid))
    result = BESIDE[name](x, w)
    return gradients((result.mask_with(mask) if later else result).sum(), w, 2)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("wide", [True, False], ids=["elements", "rows"])
@pytest.mark.parametrize("name", BESIDE)
def test_a_plain_operand(name: str, wide: bool, storage: str) -> None:
    mask = ELEMENTS if wide else ROWS
    with md.densify("always"):
        found = beside(name, mask, wide, STORAGES[storage], later=True)
    expected = [torch.where(torch.isnan(g), 0, g) for g in beside(name, mask, wide, lambda x: x, later=False)]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_a_plain_operand_pays_only_where_its_gradient_is_a_product() -> None:
    x = md.masked_tensor(torch.ones(2), torch.tensor([True, False]))
    w = torch.ones(2, requires_grad=True)

    def nodes_of(result: Any) -> list[str]:
        (node, _), *_ = result.grad_fn.next_functions
        return [type(below).__name__ for below, _ in node.next_functions if below is not None]

    assert nodes_of(x + w) == ["AccumulateGrad"]
    assert "BesideBackward" in nodes_of(x * w)


def test_what_is_reached_elsewhere_gets_its_gradient() -> None:
    """A gradient that arrives keeps its NaN, as torch's does: only what nothing reaches is left out."""
    x = torch.tensor([0.0, 2.0], requires_grad=True)
    logarithm = md.as_masked_tensor(x, torch.tensor([True, True])).log()
    (logarithm.mask_with(torch.tensor([False, True])).sum() + logarithm[0]).backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.tensor([torch.inf, 0.5]))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    "apart", [torch.unbind, torch.unbind_copy, lambda x: torch.split_with_sizes_copy(x, (1, 2, 0))]
)
def test_a_part_is_reached_by_its_own_gradient(apart: Function, storage: str) -> None:
    x = torch.tensor([[1.0, 2.0], [0.0, 4.0], [0.0, 0.0]], requires_grad=True)
    parts = apart(STORAGES[storage](md.as_masked_tensor(x, torch.ones(3, 2, dtype=torch.bool))).log())
    missing = [part.mask_with(torch.zeros(part.shape, dtype=torch.bool)) for part in parts[1:]]
    (sum(part.sum().to_tensor(0.0) for part in missing) + parts[0].sum()).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[1.0, 0.5], [0.0, 0.0], [0.0, 0.0]]


ROWS_ONE_BY_ONE: dict[str, Callable[[Any, int], Any]] = {
    "x[n]": lambda x, n: x[n],
    "slice": lambda x, n: x[n : n + 1],
    "column of the transpose": lambda x, n: x.mT[:, n],
    "index": lambda x, n: x[torch.tensor([n])],
    "index_select": lambda x, n: x.index_select(0, torch.tensor([n])),
    "gather": lambda x, n: x.gather(0, torch.tensor([[n, n]])),
    "copy": lambda x, n: torch.slice_copy(x, 0, n, n + 1),
}


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("row", ROWS_ONE_BY_ONE)
def test_rows_that_are_taken_one_by_one(row: str, storage: str) -> None:
    """The gradient of one that is used as a whole is 0 elsewhere, and has reached nothing there."""
    x = torch.tensor([[1.0, 2.0], [0.0, 4.0], [5.0, 1.0]], requires_grad=True)
    with md.densify("always"):
        logarithm = STORAGES[storage](md.as_masked_tensor(x, torch.ones(3, 2, dtype=torch.bool))).log()
        first, missing = (ROWS_ONE_BY_ONE[row](logarithm, n) for n in range(2))
        missing = missing.mask_with(torch.zeros(missing.shape, dtype=torch.bool))
        (first.sum() + missing.sum().to_tensor(0.0)).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[1.0, 0.5], [0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("used", [[0, 1, 2], [0, 2], [1]])
def test_a_packed_tensor_is_taken_apart_for_nothing(used: list[int]) -> None:
    """Where all parts are used as they are, no operator says what they reach; else, one says it of each."""
    x = md.from_lengths(torch.rand(2, 4, 6), torch.tensor([4, 2])).requires_grad_()
    parts = (x * 1).to_packed().chunk(3, -1)
    loss = sum((n + 1) * parts[n].sum() for n in used)
    for _ in range(2):
        x.grad = None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
            loss.backward(retain_graph=True)
        assert x.grad.to_tensor(0)[1, :2, ::2].tolist() == [[n + 1 if n in used else 0 for n in range(3)]] * 2
        assert ("aten::ne" in {event.key for event in profile.key_averages()}) is (len(used) < 3)


def test_both_parts_of_a_complex_number_are_reached() -> None:
    """Sums of gradients keep those that come from its imaginary part alone: rotary embeddings by complex numbers."""
    mask = torch.tensor([[True, True], [False, False]])
    x = md.masked_tensor(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), mask, requires_grad=True)
    h, k = x * 1, x * 1
    (torch.view_as_real(torch.view_as_complex(h)) + k).sum().backward()
    assert x.grad.to_tensor(0).tolist() == [[2, 2], [0, 0]]
    re, im = (md.masked_tensor(torch.ones(2), mask[:, 0], requires_grad=True) for _ in range(2))
    z = torch.cat([torch.complex(re * 1, im * 1), torch.complex(re * 1, im * 1)[:1]])
    (z.real.sum() + z.imag.sum() + im.sum()).backward()
    assert (re.grad.to_tensor(0).tolist(), im.grad.to_tensor(0).tolist()) == ([2, 0], [3, 0])


def test_a_graph_run_twice_forgets_the_first_run() -> None:
    x = torch.tensor([0.0, 2.0], requires_grad=True)
    logarithm = md.as_masked_tensor(x, torch.tensor([True, True])).log()
    part, whole = logarithm.mask_with(torch.tensor([False, True])).sum(), logarithm.sum()
    (first,) = torch.autograd.grad(part, x, retain_graph=True)
    (second,) = torch.autograd.grad(whole, x, retain_graph=True)
    (third,) = torch.autograd.grad(part, x)
    assert first.tolist() == third.tolist() == [0.0, 0.5]
    assert second.tolist() == [torch.inf, 0.5]


def test_a_missing_variance() -> None:
    z = torch.tensor([[1.0, 2.0], [3.0, 5.0]], requires_grad=True)
    masked = md.as_masked_tensor(z, torch.tensor([[True, False], [True, True]]))
    md.var(masked, 0, skipna=False).sum().backward()
    assert z.grad is not None
    torch.testing.assert_close(z.grad, torch.tensor([[-2.0, 0.0], [2.0, 0.0]]))


@pytest.mark.parametrize("storage", ["dense", "packed"])
def test_a_padded_encoder_pays_nothing(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a padded batch nothing is narrower than its operands: nobody needs to know, and no operator is called."""
    from masked_dispatch.autograd.reached import Call

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = STORAGES[storage](md.from_lengths(torch.randn(2, 4, 8), torch.tensor([4, 2]))).detach().requires_grad_()
    needs, asked = Call.needs, []

    def noted(call: Call, node: Any, grad: Tensor) -> bool:
        asked.append(needs(call, node, grad))
        return asked[-1]

    def operators() -> dict[str, int]:
        encoder.zero_grad()
        x.grad = None
        loss = encoder(x).pow(2).mean()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
            loss.backward()
        return {e.key: e.count for e in profile.key_averages() if e.key.startswith("aten::")}

    monkeypatch.setattr(Call, "needs", noted)
    with_reached = operators()
    assert sum(with_reached.values()) > 100
    assert len(asked) > 10
    assert not any(asked)
    monkeypatch.setattr(Call, "needs", lambda *_: False)
    assert operators() == with_reached


@pytest.mark.parametrize("convert", [lambda x: x.to_packed(), lambda x: x.to_sparse()])
def test_a_gradient_under_an_equal_mask_is_no_narrower(convert: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    from masked_dispatch.autograd.reached import Call

    x = md.from_lengths(torch.randn(2, 4, 3), torch.tensor([4, 2])).requires_grad_()
    result = (convert(x) * 2).exp().to_dense()
    needs, asked = Call.needs, []
    monkeypatch.setattr(Call, "needs", lambda *args: asked.append(needs(*args)) or asked[-1])
    result.backward(md.masked_tensor(torch.ones(2, 4, 3), result.get_mask().clone()))
    assert asked == [False] * 4
    torch.testing.assert_close(x.grad.to_tensor(0), (2 * (x * 2).exp()).detach().to_tensor(0))


def test_nothing_is_kept_alive() -> None:
    """What a call leaves on its result's node holds no operand's data."""
    x = md.masked_tensor(torch.ones(3), torch.tensor([True, False, True])).requires_grad_()
    operand = x.sin()
    data = weakref.ref(operand._data)
    result = operand + 1
    del operand
    gc.collect()
    assert data() is None
    result.sum().backward()
    assert x.grad is not None


def test_without_derivatives_nothing_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    from masked_dispatch.autograd import reached

    def fail(*_: object) -> None:
        raise AssertionError("a call without derivatives left something for backward")

    monkeypatch.setattr(reached, "_stand_ins", fail)
    x = md.from_lengths(torch.randn(2, 4, 8), torch.tensor([4, 2]))
    for stored in (x, x.to_packed()):
        (nn.Linear(8, 3).requires_grad_(requires_grad=False)(stored).softmax(-1) + 1).max(1)
    with pytest.raises(AssertionError, match="left something"):
        nn.Linear(8, 3)(x)
