"""masked_dispatch.functional on sparse and packed storage: as on dense storage, and stored as its argument."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import masked_dispatch as md
from masked_dispatch import functional as F
from samples_for_transforms import SHAPE, STORED, dense, layouts, same

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "elementwise": lambda x: (x.exp() * x).sum(),
    "softmax": lambda x: x.softmax(-1).pow(2).sum(),
    "rows": lambda x: x.sum(-1).pow(3).sum(),
    "extrema": lambda x: x.amax(1).sum(),
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x, (8,)).pow(3).sum(),
    "product": lambda x: (x @ torch.linspace(-1, 1, 16, dtype=x.dtype).reshape(8, 2)).exp().sum(),
    "stored densely": lambda x: x.cumsum(1).pow(2).sum(),
}
# Each function in two storages, each storage with two functions.
crossed = pytest.mark.parametrize(
    ("storage", "function"),
    [
        pytest.param(storage, FUNCTIONS[name], id=f"{name}-{storage}")
        for n, name in enumerate(FUNCTIONS)
        for storage in ([*STORED][n % len(STORED)], [*STORED][(n + 3) % len(STORED)])
    ],
)


@crossed
def test_gradients_are_stored_as_the_argument_is(storage: str, function: Callable[[Tensor], Tensor]) -> None:
    x, base = STORED[storage](dense()), dense()
    gradient, value = F.grad_and_value(function)(x)
    same(gradient, F.grad(function)(base), x.storage_layout)
    same(value, function(base))

    def twice(x: Tensor) -> Tensor:
        return F.grad(function)(x).pow(2).sum()

    same(F.grad(twice)(x), F.grad(twice)(base), x.storage_layout)


@crossed
def test_tangents_and_cotangents_may_be_stored_anyhow(storage: str, function: Callable[[Tensor], Tensor]) -> None:
    x, base = STORED[storage](dense()), dense()
    expected = F.jvp(function, (base,), (dense(1),))
    plain = dense(1).to_tensor(7.0)  # what is said about invalid elements does not matter
    for tangent in (dense(1), STORED[storage](dense(1)), plain):
        for found, wanted in zip(F.jvp(function, (x,), (tangent,)), expected, strict=True):
            same(found, wanted)
    output, pull = F.vjp(torch.exp, x)
    same(output, base.exp(), x.storage_layout)
    for cotangent in (dense(1), STORED[storage](dense(1)), plain):
        same(pull(cotangent)[0], base.exp() * dense(1), x.storage_layout)


@layouts
def test_what_maps_over_dimensions_stores_densely_if_the_policy_lets_it(storage: str) -> None:
    x, base = STORED[storage](dense()), dense()
    same(F.vmap(lambda row: row.softmax(-1).sum(0))(x), F.vmap(lambda row: row.softmax(-1).sum(0))(base))
    for jacobian in (F.jacrev, F.jacfwd):
        same(jacobian(lambda x: x.sum((1, 2)))(x), jacobian(lambda x: x.sum((1, 2)))(base))
    with md.densify("never"):
        for name, transform in (("vmap", F.vmap), ("jacrev", F.jacrev), ("jacfwd", F.jacfwd)):
            with pytest.raises(md.MaskedSemanticsError, match=rf"functional\.{name} has no sparse form for this call"):
                transform(lambda x: x.sum())(x)
        F.grad(lambda x: x.exp().sum())(x)


@layouts
def test_nothing_under_the_mask_is_observable(storage: str) -> None:
    """NaN that lies among the stored values, in blocks and dense dimensions, reaches no gradient."""
    x = STORED[storage](dense())
    for function in FUNCTIONS.values():
        assert F.grad(function)(x).to_tensor(0).isfinite().all()


def test_what_is_captured_keeps_its_storage_and_its_facts() -> None:
    x, base = dense().to_sparse_csr(), dense()
    weight = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(8, 3)

    def loss(x: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda weight: (x @ weight).pow(2).sum() + x.amax(1).sum()

    for _ in range(2):  # what was found out about the pattern in a transform is not used after it
        assert_close(F.grad(loss(x))(weight), F.grad(loss(base))(weight))
        same(x.sum(1), base.sum(1))
    rows = torch.stack([weight, 2 * weight])
    same(F.vmap(loss(x))(rows), F.vmap(loss(base))(rows))


def test_gradients_of_gradients_from_outside() -> None:
    x = dense().to_packed().requires_grad_()
    F.grad(lambda x: x.exp().sum())(x).sum().backward()
    same(x.grad, dense().exp(), x.storage_layout)


def test_aux_and_arguments_of_several_storages() -> None:
    x, y = dense().to_sparse(), dense(1).to_packed()

    def function(inputs: dict[str, Tensor], scale: Tensor) -> tuple[Tensor, Tensor]:
        return (inputs["x"] * scale).sum() + inputs["y"].pow(2).sum(), inputs["y"] * 2

    (found, by_scale), aux = F.grad(function, argnums=(0, 1), has_aux=True)({"x": x, "y": y}, torch.tensor(3.0))
    same(found["x"], md.masked_tensor(torch.full(SHAPE, 3.0, dtype=torch.float64), x.get_mask()), torch.sparse_coo)
    same(found["y"], dense(1) * 2, y.storage_layout)
    same(aux, dense(1) * 2, y.storage_layout)
    assert_close(by_scale, dense().sum().to_tensor(0).to(torch.float32))


def test_heads_in_front_of_time() -> None:
    """Packed rows seen as (batch, heads, time, head): dense dimensions before a sparse one."""
    x, base = (t.reshape(4, 6, 2, 4).transpose(1, 2) for t in (dense().to_packed(), dense()))

    def attended(x: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x).pow(2).sum()

    same(F.grad(attended)(x), F.grad(attended)(base), x.storage_layout)


def test_writes_inside_stay_inside() -> None:
    x = dense().to_sparse()

    def doubled(x: Tensor) -> Tensor:
        return x.mul_(2).sum()

    same(F.grad(doubled)(x), md.masked_tensor(torch.full(SHAPE, 2.0, dtype=torch.float64), x.get_mask()))
    same(x, dense())
    same(F.grad(lambda x: (x.detach() * x).sum())(x), dense(), torch.sparse_coo)


# ------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("name", ["grad", "vmap", "jacrev"])
def test_torch_s_own_transforms_are_refused(name: str) -> None:
    with pytest.raises(md.MaskedSemanticsError, match=r"transform of the same name from masked_dispatch\.functional"):
        getattr(torch.func, name)(lambda x: x.sum().to_tensor(0))(dense().to_sparse())


def test_what_outlives_its_transform_is_refused() -> None:
    kept: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        kept.append(x * 2)
        return x.sum()

    F.grad(function)(dense().to_sparse_csr())
    with pytest.raises(md.MaskedSemanticsError, match=r"\(4, 6, 8\) that was made inside a transform .* leaves it"):
        kept[0].sum()


def test_a_captured_tensor_that_requires_grad_is_refused() -> None:
    x = dense().to_packed().requires_grad_()
    with pytest.raises(md.MaskedSemanticsError, match=r"that requires grad is used inside a torch\.func transform"):
        F.grad(lambda scale: (x * scale).sum())(torch.tensor(1.0, dtype=torch.float64))


def test_tangents_have_the_shape_of_what_they_belong_to() -> None:
    with pytest.raises(RuntimeError, match=r"of shape \(3,\) was given for a masked tensor of shape \(4, 6, 8\)"):
        F.jvp(torch.exp, (dense().to_sparse(),), (torch.ones(3),))
