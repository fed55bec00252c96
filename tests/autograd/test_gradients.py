"""Gradients through the tensor (P5): both orders, both modes, different masks on the operands, NaN under them.

Conformance asks each operator by itself (P3, P5); here functions of several operands and operators go through the
public surface and are compared with finite differences, which know nothing of rules, in forward mode too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

import masked_dispatch as md

NAN = float("nan")
SHAPE = (3, 4)
FIRST = torch.tensor([[True, True, False, True], [False, True, True, False], [False, False, False, False]])
SECOND = torch.tensor([[True, False, True, True], [True, True, True, False], [True, True, False, True]])
Function = Callable[[Any, Any, Tensor], Any]


def operands(garbage: float = NAN) -> tuple[Tensor, Tensor, Tensor]:
    """Data of two masked operands, and a plain one of shape (4, 4); away from the kinks and poles of the functions."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.rand(SHAPE, generator=generator, dtype=torch.float64) + 0.3 for _ in range(2))
    w = torch.rand(4, 4, generator=generator, dtype=torch.float64) + 0.3
    a, b = torch.where(FIRST, a, garbage), torch.where(SECOND, b, garbage)
    return a.requires_grad_(), b.requires_grad_(), w.requires_grad_()


# One of each kind: what they show is done by the tensor, not by a rule.
FUNCTIONS: dict[str, Function] = {
    "where": lambda a, b, w: torch.where(a > 0.8, a, b * w[0]),
    "prod": lambda a, b, w: a.prod(-1) + (a * b).prod(),
    "softmax": lambda a, b, w: a.softmax(-1) * b,
    "batch_norm": lambda a, b, w: F.batch_norm(b, None, None, w[0], w[1], training=True),
    "einsum": lambda a, b, w: torch.einsum("ij,kj,jl->ikl", a, b, w),
    "attention": lambda a, b, w: F.scaled_dot_product_attention(a[None], b[None], (b * a.exp())[None] @ w),
    "index": lambda a, b, w: a[torch.tensor([0, 0, 1])] * b[:, [1, 2, 3, 0]],
    "scatter": lambda a, b, w: b.scatter(1, torch.tensor([[0, 2], [1, 3], [2, 0]]), a[:, :2]),
    "cross_entropy": lambda a, b, w: F.cross_entropy(b * w[0], torch.tensor([0, 1, 3])),
    "in place": lambda a, b, w: (a * 1).mul_(b).add_(w[0]),
    "in place through a view": lambda a, b, w: written(a * 1, lambda y: y[1].mul_(w[0]).exp_()),
    "assigned": lambda a, b, w: written(a * 1, lambda y: y.__setitem__((slice(None), 1), b[:, 2] * w[0, :3])),
    "a plain tensor updated": lambda a, b, w: written(w[:3] * 1, lambda y: y.addcmul_(a, b)),
}


def written(y: Tensor, write: Callable[[Tensor], Any]) -> Tensor:
    write(y)
    return y


def of_plain_data(function: Function) -> Callable[..., Tensor]:
    """The function of data: masked inside, filled outside."""

    def plain(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
        result = function(md.as_masked_tensor(a, FIRST), md.as_masked_tensor(b, SECOND), w)
        return result.to_tensor(0.0) if isinstance(result, md.MaskedTensor) else result

    return plain


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_by_finite_differences(name: str) -> None:
    function, inputs = of_plain_data(FUNCTIONS[name]), operands()
    # Fused attention has no forward derivative, for plain tensors either; torch 2.14 takes it in three dimensions too.
    with sdpa_kernel(SDPBackend.MATH):
        gradcheck(function, inputs, check_forward_ad=True, fast_mode=True)
        gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_masked_leaves_get_masked_gradients_and_plain_ones_plain(name: str) -> None:
    function = FUNCTIONS[name]
    data = operands()
    a = md.masked_tensor(data[0].detach(), FIRST, requires_grad=True)
    b = md.masked_tensor(data[1].detach(), SECOND, requires_grad=True)
    w = data[2]
    result = function(a, b, w)
    result.sum().backward()
    output = of_plain_data(function)(*(plain := operands()))
    expected = torch.autograd.grad(output.sum(), plain, allow_unused=True)
    for leaf, mask, gradient in ((a, FIRST, expected[0]), (b, SECOND, expected[1])):
        if leaf.grad is None:
            assert gradient is None or not gradient.any()
            continue
        assert isinstance(leaf.grad, md.MaskedTensor)
        assert torch.equal(leaf.grad.get_mask(), mask)
        assert_close(leaf.grad.to_tensor(0.0), gradient)
    assert type(w.grad) in (Tensor, type(None))
    if w.grad is not None:
        assert_close(w.grad, expected[2])


# ----------------------------------------------------------------------------------------------------- forward mode


def test_forward_mode_on_masked_tensors() -> None:
    a, b, w = (t.detach() for t in operands())
    x, t = md.masked_tensor(a, FIRST), md.masked_tensor(b, SECOND)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, t)
        value, tangent = forward_ad.unpack_dual((dual.exp() * w[0]).sum(-1))
        plain_value, plain_tangent = forward_ad.unpack_dual((dual @ w).mean().to_tensor(0.0))
    expected = (x.exp() * w[0] * t.to_tensor(0.0)).sum(-1)
    assert torch.equal(value.get_mask(), tangent.get_mask())
    assert_close(tangent.to_tensor(0.0), expected.to_tensor(0.0))
    assert type(plain_value) is type(plain_tangent) is Tensor


def test_forward_over_reverse() -> None:
    a, _, _ = (t.detach() for t in operands())
    x = md.masked_tensor(a, FIRST)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.requires_grad_(), md.masked_tensor(torch.ones_like(a), FIRST))
        (gradient,) = torch.autograd.grad((dual**3).sum(), dual, create_graph=True)
        tangent = forward_ad.unpack_dual(gradient).tangent
    assert_close(tangent.to_tensor(0.0), (6 * x.detach()).to_tensor(0.0))


# ------------------------------------------------------------------------------------------------ what autograd offers


def leaf() -> md.MaskedTensor:
    return md.masked_tensor(operands()[0].detach(), FIRST, requires_grad=True)


def test_a_loss_with_nothing_valid_goes_backward_and_gives_zeros() -> None:
    x = md.masked_tensor(torch.full((3, 4), NAN), torch.zeros(3, 4, dtype=torch.bool), requires_grad=True)
    w = torch.ones(4, requires_grad=True)
    layer = nn.Linear(4, 2)
    loss = (layer(x * w).relu().softmax(-1)).mean()
    with pytest.raises(md.InvalidValueError):
        loss.item()
    loss.backward()
    assert not x.grad.get_mask().any()
    assert torch.equal(x.grad.to_tensor(0.0), torch.zeros(3, 4))
    for plain in (w, *layer.parameters()):
        assert type(plain.grad) is Tensor
        assert torch.equal(plain.grad, torch.zeros_like(plain))


def test_hooks_on_modules_and_nodes() -> None:
    layer, seen = nn.Linear(4, 2, dtype=torch.float64), []
    layer.register_full_backward_hook(lambda module, grad_input, grad_output: seen.append((grad_input, grad_output)))
    layer.register_forward_hook(lambda module, inputs, output: seen.append(output))
    x = leaf()
    y = layer(x * 1)
    y.grad_fn.register_prehook(lambda grads: seen.append(grads))
    y.sum().backward()
    assert len(seen) == 3
    assert isinstance(seen[0], md.MaskedTensor)
    assert isinstance(x.grad, md.MaskedTensor)


def test_retain_grad_and_gradients_of_intermediates() -> None:
    x = leaf()
    y = x.exp()
    y.retain_grad()
    (y * 2).sum().backward()
    z = x.exp()
    (gradient,) = torch.autograd.grad((z * 2).sum(), z)
    for found in (y.grad, gradient):
        assert isinstance(found, md.MaskedTensor)
        assert torch.equal(found.get_mask(), FIRST)
        assert_close(found.to_tensor(0.0), 2.0 * FIRST.double())


@pytest.mark.parametrize("gradient", ["masked", "plain", "other mask"])
def test_backward_from_a_masked_result_with_a_given_gradient(gradient: str) -> None:
    x = leaf()
    y = x * 3
    given = {
        "masked": md.masked_tensor(torch.where(FIRST, 2.0, NAN).double(), FIRST),
        "plain": torch.full(SHAPE, 2.0, dtype=torch.float64),
        "other mask": md.masked_tensor(torch.where(SECOND, 2.0, NAN).double(), SECOND),
    }[gradient]
    y.backward(given)
    counted = FIRST & SECOND if gradient == "other mask" else FIRST
    assert torch.equal(x.grad.get_mask(), FIRST)
    assert_close(x.grad.to_tensor(0.0), 6.0 * counted.double())


def test_saved_tensor_hooks_pack_and_unpack_what_is_saved() -> None:
    packed: list[Any] = []

    def pack(t: Tensor) -> Tensor:
        packed.append(type(t))
        return t.clone()

    def run() -> Tensor:
        x = leaf()
        (x.exp() * x).softmax(-1).var().backward()
        return x.grad.to_tensor(0.0)

    expected = run()
    with torch.autograd.graph.saved_tensors_hooks(pack, Tensor.clone):
        assert_close(run(), expected)
    assert packed
    with torch.autograd.graph.save_on_cpu():
        assert_close(run(), expected)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_mode_finds_no_fault_in_garbage() -> None:
    for function in FUNCTIONS.values():
        with torch.autograd.detect_anomaly(check_nan=True):
            of_plain_data(function)(*operands()).sum().backward()
    x = leaf()
    with pytest.raises(RuntimeError, match="returned nan values"), torch.autograd.detect_anomaly(check_nan=True):
        (x * NAN).sum().backward()


def test_no_grad_and_inference_mode() -> None:
    x = leaf()
    with torch.no_grad():
        y = x.exp()
    assert not y.requires_grad
    with torch.inference_mode():
        z = x.exp().mean(-1)
        z[0] = 1.0
        assert z.is_inference()
    # A fill under its mask makes another tensor of it, which may be saved; what is wholly valid is saved as it is.
    (x.sum(-1) * z).sum().backward()
    assert_close(x.grad.to_tensor(0.0), z.clone().unsqueeze(-1).expand_as(x).mask_like(x).to_tensor(0.0))
    with torch.inference_mode():
        whole = md.masked_tensor(torch.ones(3))
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        (x.sum(-1) * whole).sum()
    assert_close(z.clone().exp().to_tensor(0.0)[0].item(), torch.e)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_it_does_for_plain_tensors(dtype: torch.dtype) -> None:
    layer = nn.Linear(4, 4)
    data = operands()[0].detach().float()
    with torch.autocast("cpu", dtype):
        x = md.masked_tensor(data, FIRST, requires_grad=True)
        hidden = layer(x)
        total = hidden.float().softmax(-1).sum()
        plain = layer(torch.ones(3, 4))
        assert hidden.dtype == plain.dtype == dtype
        assert (hidden @ hidden.mT).dtype == (plain @ plain.mT).dtype
        assert F.mse_loss(hidden, plain).dtype == F.mse_loss(plain, plain).dtype == torch.float32
        assert hidden.softmax(-1).dtype == plain.softmax(-1).dtype
        assert F.layer_norm(hidden, (4,)).dtype == F.layer_norm(plain, (4,)).dtype
    total.backward()
    assert x.grad.dtype == layer.weight.grad.dtype == torch.float32
    assert torch.equal(x.grad.get_mask(), FIRST)


def test_gradients_may_be_set_and_cleared() -> None:
    x = leaf()
    x.sum().backward()
    x.grad.zero_()
    x.sum().backward()
    assert_close(x.grad.to_tensor(0.0)[FIRST], torch.ones(5, dtype=torch.float64))
    x.grad = None
    x.sum().backward()
    assert torch.equal(x.grad.get_mask(), FIRST)
    x.grad = x.detach().clone()
    assert isinstance(x.grad, md.MaskedTensor)
