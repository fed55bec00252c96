"""Extents pass the transforms of masked_dispatch.functional, forward mode, inference mode and autocast."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import masked_dispatch as md
from comparison import same_extents as same
from masked_dispatch import MaskedSemanticsError
from masked_dispatch import functional as F

LENGTHS = [4, 2, 0, 3]
W = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def batch(side: str = "right") -> md.MaskedTensor:
    generator = torch.Generator().manual_seed(0)
    there = torch.arange(5) < torch.tensor(LENGTHS)[:, None]
    there = there if side == "right" else there.flip(1)
    data = torch.randn(4, 5, 2, dtype=torch.float64, generator=generator).masked_fill(~there[..., None], torch.nan)
    return md.padded(md.masked_tensor(data, there[..., None].expand(4, 5, 2)), dim=1)


def with_mean_joined(x: Tensor) -> Tensor:
    return torch.nn.functional.linear(torch.cat([x, x.mean(-2, keepdim=True).expand_as(x)], -1), W).softmax(-2)


OF_SAMPLES: dict[str, Callable[[Tensor], Tensor]] = {
    "features joined": with_mean_joined,
    "differences": lambda x: x[..., 1:, :] - x[..., :-1, :],
    "flip": lambda x: x + x.flip(-2),
    "steps stacked": lambda x: torch.stack([x[..., t, :].tanh() for t in range(x.shape[-2])], -2),
    "last feature": lambda x: x[..., -1],
    "a step beyond samples": lambda x: torch.cat([x[..., 3, :], x.new_ones(1).expand_as(x[..., 3, :])], -1) @ W.T,
    "attention": lambda x: (x @ x.mT).softmax(-1) @ x,
}


@pytest.mark.filterwarnings("ignore:x.* is an end of the batch:masked_dispatch.BatchEndWarning")  # in the loop
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("function", OF_SAMPLES.values(), ids=OF_SAMPLES)
def test_vmap_over_samples_is_the_batch(function: Callable[[Tensor], Tensor], side: str) -> None:
    x = batch(side)
    same(F.vmap(function)(x), function(x))
    same(F.vmap(function, in_dims=2, out_dims=-1)(x.movedim(0, 2)), function(x).movedim(0, -1))
    same(F.vmap(function, chunk_size=2)(x), function(x))


def test_vmap_over_features_keeps_what_samples_are() -> None:
    x = batch()
    same(F.vmap(lambda f: f - f.mean(1, keepdim=True), in_dims=2, out_dims=2)(x), x - x.mean(1, keepdim=True))


def test_vmap_over_positions_is_refused() -> None:
    with pytest.raises(MaskedSemanticsError, match=r"vmap would map over dimension 1.*numbers positions.*without_exte"):
        F.vmap(lambda step: step * 2, in_dims=1)(batch())
    assert F.vmap(lambda step: step * 2, in_dims=1)(batch().without_extent()).extent is None


def test_layouts_that_meet_in_a_transform_are_refused() -> None:
    for function in (lambda x, y: (x + y).sum(), lambda x, y: F.vmap(torch.add)(x, y).sum()):
        F.grad(function)(batch("left"), batch("left"))
        with pytest.raises(MaskedSemanticsError, match="add: `self` and `other` have samples at different places"):
            F.grad(function)(batch("left"), batch())


@pytest.mark.filterwarnings("ignore:x.* is an end of the batch:masked_dispatch.BatchEndWarning")  # in the loop
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("function", OF_SAMPLES.values(), ids=OF_SAMPLES)
def test_derivatives_have_the_extents_of_their_primals(function: Callable[[Tensor], Tensor], side: str) -> None:
    x = batch(side)
    leaf = x.detach().requires_grad_()
    output = function(leaf)
    (expected,) = torch.autograd.grad(output.tanh().sum(), leaf)
    gradient, value = F.grad_and_value(lambda x: function(x).tanh().sum())(x)
    torch.testing.assert_close(gradient.to_tensor(0), expected.to_tensor(0), rtol=1e-12, atol=1e-12)
    assert gradient.extent.tolist() == x.extent.tolist()
    torch.testing.assert_close(value.to_tensor(0), output.detach().tanh().sum().to_tensor(0))
    found, vjp = F.vjp(function, x)
    same(found, output.detach())
    assert vjp(torch.ones_like(found))[0].extent.tolist() == x.extent.tolist()
    found, tangent = F.jvp(function, (x,), (x * 2,))
    same(found, output.detach())
    assert tangent.extent.tolist() == found.extent.tolist()


def test_jacobians_have_the_extents_of_both() -> None:
    x = batch()
    for transform in (F.jacrev, F.jacfwd):
        jacobian = transform(lambda x: x.sum(2))(x)
        there = x.extent[..., 0]
        expected = there[:, :, None, None, None] & x.extent
        assert jacobian.extent.tolist() == expected.tolist()


def test_forward_mode_inference_mode_and_autocast_keep_extents() -> None:
    x = batch()
    with forward_ad.dual_level():
        output = with_mean_joined(forward_ad.make_dual(x, x * 2))
        primal, tangent = forward_ad.unpack_dual(output)
        same(primal, with_mean_joined(x))
        assert tangent.get_mask().tolist() == primal.get_mask().tolist()
    with torch.inference_mode():
        same(with_mean_joined(x), with_mean_joined(batch()))
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.nn.functional.linear(x.float(), W[:, :2].float())
    assert found.dtype is torch.bfloat16
    assert found.extent[..., 0].tolist() == x.extent[..., 0].tolist()


@pytest.mark.parametrize("missing", [False, True])
def test_stored_rows_know_it_in_transforms(missing: bool) -> None:
    def loss(x: Tensor) -> Tensor:
        return with_mean_joined(x).square().sum().to_tensor(0)

    x = batch()
    x = x.mask_with(torch.arange(5)[:, None] != 1) if missing else x
    for stored in (x.to_packed(), x.to_sparse()):
        same(F.grad(loss)(stored).to_dense(), F.grad(loss)(x))
        value, found = F.jvp(with_mean_joined, (stored,), (stored,))
        expected, tangent = F.jvp(with_mean_joined, (x,), (x,))
        same(value.to_dense(), expected)
        same(found.to_dense(), tangent)
