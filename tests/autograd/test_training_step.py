"""What a training step saves: views' formulas on plain gradients, no second fill, torch's kernels on whole rows."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.testing import assert_close

import masked_dispatch as md
from few_elements import BIG, BIG_ROWS
from masked_dispatch.dispatch import ladder, run_rule
from op_registry.records import fill

NAN = float("nan")
B, T, D = 3, 4, 6
ROWS = torch.tensor([[True, True, False, False], [True] * 4, [False, True, False, True]])[..., None]
EACH = torch.rand(B, T, D, generator=torch.Generator().manual_seed(1)) > 0.4
MASKS = {"rows": ROWS, "elements": EACH, "none": None}
VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda x: x.view(B * T, D),
    "view, heads": lambda x: x.view(B, T, 2, 3),
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(2, 0, 1),
    "select": lambda x: x.select(1, 2),
    "slice": lambda x: x[:, 1:3],
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x[:1].squeeze(0),
    "expand": lambda x: x[:, :1].expand(B, T, D),
    "diagonal": lambda x: x.diagonal(0, 1, 2),
    "unfold": lambda x: x.unfold(1, 2, 1),
    "as_strided": lambda x: x.as_strided((B, D), (T * D, 1), D),
    "split": lambda x: x.split(2, -1),
    "unbind": lambda x: x.unbind(0),
    "chain": lambda x: x.transpose(0, 1).unsqueeze(0).transpose(0, -1).squeeze(-1)[1:],
}


def data(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(0), dtype=dtype)


def masked(mask: Tensor | None, garbage: float = NAN) -> Tensor:
    x = data() if mask is None else torch.where(mask, data(), garbage)
    return md.masked_tensor(x, mask).requires_grad_()


def as_list(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, (list, tuple)) else [result]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ran on masked tensors: rules, and views below autograd."""
    seen: list[str] = []
    rule, view = run_rule.run_rule, ladder.view_below

    def counted(run: Any, of: Any, *rest: Any) -> Any:
        seen.append(str(of))
        return rule(run, of, *rest)

    def counted_view(*args: Any) -> Any:
        seen.append("a view")
        return view(*args)

    monkeypatch.setattr(run_rule, "run_rule", counted)
    monkeypatch.setattr(ladder, "view_below", counted_view)
    return seen


# Each view under one mask, and one view under each.
VIEWS_UNDER_MASKS = [*((name, "rows") for name in VIEWS), ("select", "elements"), ("select", "none")]


@pytest.mark.parametrize(("name", "mask"), VIEWS_UNDER_MASKS)
def test_the_formula_of_a_view_sees_plain_tensors(name: str, mask: str, calls: list[str]) -> None:
    x = masked(MASKS[mask])
    views = as_list(VIEWS[name](x))
    gradients = [v.detach().clone() for v in views]
    calls.clear()
    (gradient,) = torch.autograd.grad(views, x, gradients)
    assert calls == []
    assert torch.equal(gradient.get_mask(), x.get_mask())


MASKS_AND_GRADIENTS = list(itertools.product(MASKS, ["the view's mask", "another mask", "plain"]))
# Each view in two of the nine pairs of a mask and a gradient.
PAIRED = [(name, *pair) for name, pair in zip([*VIEWS, *VIEWS], itertools.cycle(MASKS_AND_GRADIENTS), strict=False)]


@pytest.mark.parametrize(("name", "mask", "given"), PAIRED)
def test_the_gradient_of_a_view_is_that_of_what_is_valid(name: str, mask: str, given: str) -> None:
    """Whatever mask the gradient comes with; NaN under it does not show."""
    x, plain = masked(MASKS[mask]), data().requires_grad_()
    views, of_plain = as_list(VIEWS[name](x)), as_list(VIEWS[name](plain))
    gradients, expected = [], []
    generator = torch.Generator().manual_seed(2)
    for v in views:
        valid = v.get_mask()
        if given == "another mask":
            valid = valid & (torch.rand(v.shape, generator=generator) > 0.3)
        g = torch.randn(v.shape, generator=generator, dtype=torch.float64)
        if given == "plain":
            gradients.append(g)
        elif given == "another mask":
            gradients.append(md.masked_tensor(torch.where(valid, g, NAN), valid))
        else:
            gradients.append((v.detach() * 0).mask_with(valid) + torch.where(valid, g, NAN))
        expected.append(torch.where(valid, g, 0))
    torch.autograd.backward(views, gradients)
    torch.autograd.backward(of_plain, expected)
    assert x.grad is not None
    assert plain.grad is not None
    assert_close(x.grad.to_tensor(0), torch.where(x.get_mask(), plain.grad, 0))


# --------------------------------------------------------------------------------------------------------- zero already


def test_a_fact_ends_with_a_write_to_the_tensor_or_the_mask() -> None:
    validity, other = torch.ones(3, dtype=torch.int8), torch.ones(3, dtype=torch.int8)
    for write in (lambda t: t.add_(1), lambda t: t[:1].zero_(), lambda t: validity.fill_(0)):
        tensor = torch.zeros(3)
        fill.remember_zero(tensor, validity)
        assert fill.known_zero(tensor, validity)
        assert not fill.known_zero(tensor, other)
        assert not fill.known_zero(tensor.clone(), validity)
        write(tensor)
        assert not fill.known_zero(tensor, validity)


def written_by_numpy(x: md.MaskedTensor) -> None:
    x.get_data().detach().numpy()[~BIG_ROWS[:, 0]] = NAN


def written_in_shared_memory(x: md.MaskedTensor) -> None:
    """As another process would."""
    x.share_memory_()
    x._data.numpy()[~BIG_ROWS[:, 0]] = NAN


@pytest.mark.parametrize("write", [written_by_numpy, written_in_shared_memory])
@pytest.mark.parametrize("of", ["itself", "a view made before", "a view made after"])
def test_what_others_write_under_the_mask_does_not_show(write: Callable[[Any], None], of: str) -> None:
    """The product has zeroed its rows, and writes of which torch does not know follow."""
    weight = torch.randn(512, 512, requires_grad=True)
    y = F.linear(md.masked_tensor(torch.randn(BIG), BIG_ROWS), weight).detach()
    assert fill.known_zero(y._data, y._validity)
    before = y.view(8, 8, 512)
    expected = F.linear(before, weight).to_tensor(0)
    write(y)
    read = {"itself": y.clone(), "a view made before": before, "a view made after": y.view(8, 8, 512)}[of]
    product = F.linear(read, weight)
    product.sum().backward()
    assert weight.grad is not None
    assert bool(weight.grad.isfinite().all())
    assert torch.equal(product.detach().to_tensor(0).view(8, 8, 512), expected)


NOT_ZERO: dict[str, Callable[[Tensor], Tensor]] = {
    "x + 5": lambda x: x + 5,
    "5 + x": lambda x: 5 + x,
    "add.Tensor of a number": lambda x: torch.ops.aten.add.Tensor(x, 5),
    "add.Scalar": lambda x: torch.ops.aten.add.Scalar(x, 5),
    "alpha_dropout": lambda x: torch.alpha_dropout(x, 0.5, True),
    "feature_alpha_dropout": lambda x: torch.feature_alpha_dropout(x, 0.5, True),
    "a plain number": lambda x: x + torch.tensor(5.0),
    "a plain tensor": lambda x: x + torch.full(BIG, 5.0),
}


@pytest.mark.parametrize(("name", "requires_grad"), [*((name, False) for name in NOT_ZERO), ("x + 5", True)])
def test_what_is_shifted_is_not_known_to_be_zero(name: str, requires_grad: bool) -> None:
    weight, data = torch.randn(512, 512, dtype=torch.float64), torch.randn(BIG, dtype=torch.float64)
    y = F.linear(md.masked_tensor(data, BIG_ROWS).requires_grad_(), weight)
    y = y if requires_grad else y.detach()
    assert fill.known_zero(y._data, y._validity)
    shifted = NOT_ZERO[name](y)
    assert not fill.known_zero(shifted._data, shifted._validity)
    valid = BIG_ROWS[:, 0]
    assert_close(shifted.sum(0).to_tensor(0.0), shifted.to_tensor(0.0)[valid].sum(0))


def test_rows_are_zeroed_in_place_and_read_without_a_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[Any] = []
    fill_bits = fill.fill_bits
    monkeypatch.setattr(fill, "fill_bits", lambda *args: filled.append(args[0].shape) or fill_bits(*args))
    weight = torch.randn(512, 512, requires_grad=True)
    y = F.linear(md.masked_tensor(torch.randn(BIG), BIG_ROWS), weight)
    assert filled == [BIG]
    F.layer_norm(F.linear(F.dropout(F.gelu(y) + y, 0.1), weight), (512,))
    assert filled == [BIG]


def test_facts_live_no_longer_than_their_tensors() -> None:
    gc.collect()
    before = len(fill.known_tensors)
    tensor = torch.zeros(3)
    fill.remember_zero(tensor, torch.ones(3, dtype=torch.int8))
    assert len(fill.known_tensors) == before + 1
    del tensor
    assert len(fill.known_tensors) == before


def test_a_wrong_fact_is_found_where_it_is_used() -> None:
    validity = torch.tensor([1, 0, 1], dtype=torch.int8)
    tensor = torch.ones(3)
    fill.remember_zero(tensor, validity)
    with fill.zeros_verified(), pytest.raises(AssertionError, match="not zero where it is invalid"):
        fill.known_zero(tensor, validity)


def test_a_gradient_changed_by_a_hook_is_filled_again() -> None:
    """The hook writes to the gradient in place, under its mask too."""
    x = masked(ROWS)
    y = x.transpose(0, 1)
    y.register_hook(lambda g: g.mul_(NAN).fill_(1.0).mask_with(y.get_mask()))
    w = torch.ones(D, D, dtype=torch.float64, requires_grad=True)
    F.linear(y.transpose(0, 1), w).sum().backward()
    assert x.grad is not None
    assert_close(x.grad.to_tensor(0), ROWS.expand(B, T, D).to(torch.float64))


def stock_encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, dtype=torch.float64)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def encoder_step(x: Tensor, valid: Tensor) -> dict[str, Tensor]:
    encoder = stock_encoder()
    encoder(md.masked_tensor(x, valid[..., None])).mean().backward()
    return {name: p.grad for name, p in encoder.named_parameters() if p.grad is not None}


def test_a_step_of_a_stock_encoder_fills_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward: the input, the sum that a norm reads, and what attention gives; products and norms zero their own rows.

    Backward: the gradient of each of them, and of each product, norm and activation. That of the loss is a small fill,
    which is not counted.
    """
    filled = []
    fill_bits = fill.fill_bits
    monkeypatch.setattr(fill, "fill_bits", lambda *args: filled.append(args[0].shape) or fill_bits(*args))
    x, valid = torch.randn(8, 64, 64, dtype=torch.float64), torch.arange(64) < torch.arange(8, 64, 7)[:, None]
    encoder = stock_encoder()
    loss = encoder(md.masked_tensor(x, valid[..., None])).mean()
    forward = len(filled)
    loss.backward()
    backward = len(filled) - forward
    assert (forward, backward) == (5, 16)


def test_a_step_of_a_stock_encoder_gives_torchs_own_gradients() -> None:
    x, valid = torch.randn(8, 64, 64, dtype=torch.float64), torch.arange(64) < torch.arange(8, 64, 7)[:, None]
    garbage = torch.where(valid[..., None], x, NAN)
    encoder = stock_encoder()
    out = encoder(x, src_key_padding_mask=~valid)
    (torch.where(valid[..., None], out, 0).sum() / (valid.sum() * 64)).backward()
    found = encoder_step(garbage, valid)
    for name, p in encoder.named_parameters():
        assert_close(found[name], p.grad, msg=lambda m, name=name: f"{name}: {m}")


# ----------------------------------------------------------------------------------------------------------- whole rows

ON_ROWS: dict[str, Callable[[Tensor], Any]] = {
    "softmax": lambda x: x.softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "mean": lambda x: x.mean(-1),
    "max": lambda x: x.max(-1),
    "median": lambda x: x.median(-1),
    "sort": lambda x: x.sort(-1),
    "norm of order -1": lambda x: torch.linalg.vector_norm(x, -1, dim=-1),
    "layer_norm": lambda x: F.layer_norm(x, (D,)),
}


@pytest.mark.parametrize("name", ON_ROWS)
def test_rows_that_are_valid_or_not_give_exactly_what_torch_gives(name: str) -> None:
    """Values, positions and gradients to the bit: it is torch's own kernel."""
    x, plain = masked(ROWS), data().requires_grad_()
    results, expected = as_list(ON_ROWS[name](x)), as_list(ON_ROWS[name](plain))
    for result, of_plain in zip(results, expected, strict=True):
        valid = ROWS.expand(B, T, result.shape[-1]) if result.ndim == 3 else ROWS[..., 0]
        assert torch.equal(result.get_mask(), valid)
        assert torch.equal(result.to_tensor(0), torch.where(valid, of_plain, 0))
    if results[0].requires_grad:
        results[0].sum().backward()
        torch.where(valid if results[0].ndim == 2 else ROWS, expected[0], 0).sum().backward()
        assert x.grad is not None
        assert plain.grad is not None
        assert torch.equal(x.grad.to_tensor(0), plain.grad)


def test_a_norm_without_eps_leaks_nothing_from_an_invalid_row() -> None:
    """0 / 0 in a filled row; its derivative with respect to the weight would be NaN."""
    x = masked(ROWS)
    weight = torch.ones(D, dtype=torch.float64, requires_grad=True)
    F.layer_norm(x, (D,), weight, eps=0.0).sum().backward()
    assert weight.grad is not None
    assert weight.grad.isfinite().all()


# ------------------------------------------------------------------------------------------------- where values decide


@pytest.mark.parametrize("name", ["logsumexp", "amax", "softmax", "linear"])
def test_a_recorded_graph_does_not_depend_on_the_values_it_was_recorded_with(name: str) -> None:
    """In eager mode values decide on the path: whether each slice has an element, and what is known to be zero."""
    weight = torch.randn(512, 512)

    def f(data: Tensor, mask: Tensor) -> Tensor:
        x = md.as_masked_tensor(data, mask)
        return {
            "logsumexp": lambda: x.logsumexp(-1),
            "amax": lambda: x.amax(-1),
            "softmax": lambda: x.softmax(-1),
            "linear": lambda: F.linear(F.linear(x, weight), weight),
        }[name]().to_tensor(0.0)

    masks = [torch.rand(64, 1 if name == "linear" else 512) > 0.5 for _ in range(2)]
    masks[1][3] = False
    data = torch.randn(64, 512)
    recorded = make_fx(f, tracing_mode="real")(data, masks[0])
    for mask in masks:
        given = torch.where(mask, torch.randn(64, 512), NAN)
        given[5] = -math.inf if name in ("logsumexp", "amax") else given[5]
        assert_close(recorded(given, mask), f(given, mask), equal_nan=True)


PEAKS = [0.0, 1e4, -1e4, math.inf, -math.inf, NAN]


@pytest.mark.parametrize(
    ("peak", "dtype"), [*((peak, torch.float64) for peak in PEAKS), (1e4, torch.float32), (1e4, torch.bfloat16)]
)
def test_logsumexp_of_what_is_valid_alone(dtype: torch.dtype, peak: float) -> None:
    mask = torch.tensor([[True, False, True, True], [False, True, False, False], [True, True, True, True]])
    data = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    data[0, 2] = peak
    x = md.masked_tensor(torch.where(mask, data, NAN), mask).requires_grad_()
    result = x.logsumexp(-1)
    result.sum().backward()
    assert x.grad is not None
    for row, valid in enumerate(mask):
        part = data[row, valid].clone().requires_grad_()
        expected = part.logsumexp(-1)
        expected.backward()
        assert_close(result[row].to_tensor(0), expected, equal_nan=True)
        assert_close(x.grad[row].compressed(), part.grad, equal_nan=True)
