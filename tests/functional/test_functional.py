"""masked_dispatch.functional: torch.func's transforms on masked tensors; what happens to those who use torch.func."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from masked_dispatch import functional as F
from samples_for_transforms import MASK, NAN, same, sample


def rows(function: Callable[[Any], Any], x: Tensor) -> Any:
    """What vmap over dimension 0 is to give, with a loop."""
    return torch.stack([function(row) for row in x])


# ------------------------------------------------------------------------------------------------------------ vmap


@pytest.mark.parametrize(
    "function",
    [
        lambda r: r.exp(),
        lambda r: (r * r).sum(),
        lambda r: r.softmax(-1),
        lambda r: r.mean(),
        lambda r: r.cumsum(0),
        lambda r: r.sort(descending=True).values,
        lambda r: r[1:] - r[:-1],
        lambda r: torch.nn.functional.layer_norm(r, (4,)),
        lambda r: r @ torch.ones(4, 2, dtype=r.dtype),
    ],
)
def test_vmap_is_a_loop_over_rows(function: Callable[[Any], Any]) -> None:
    x = sample()
    same(F.vmap(function)(x), rows(function, x))


def test_vmap_dimensions_structures_and_plain_tensors() -> None:
    x, w = sample(), torch.arange(4.0, dtype=torch.float64)

    def function(inputs: dict[str, Tensor], w: Tensor, scale: float = 1.0) -> dict[str, Any]:
        return {"column": inputs["x"] * scale, "pair": (w * 2, inputs["x"].sum())}

    result = F.vmap(function, in_dims=({"x": 1}, 0), out_dims={"column": -1, "pair": 0})({"x": x}, w, scale=3.0)
    same(result, {"column": x * 3, "pair": (w * 2, x.sum(0))})


def test_vmap_of_an_argument_that_is_not_mapped() -> None:
    x, row = sample(), sample(1)[0]
    same(F.vmap(lambda r, s: r + s, in_dims=(0, None))(x, row), x + row)
    same(F.vmap(lambda r, s: r + s, in_dims=(0, None), chunk_size=2)(x, row), x + row)


def test_vmap_over_a_masked_keyword_and_a_captured_tensor() -> None:
    x, row = sample(), sample(1)[0]
    same(F.vmap(lambda r, *, s: r * s + row)(x, s=row), x * row + row)


@pytest.mark.parametrize(
    "mask", [None, torch.tensor([[True], [False], [True]]), torch.tensor([True, False, True, True])]
)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_vmap_over_a_broadcast_mask(mask: Tensor | None, dim: int) -> None:
    x = md.masked_tensor(torch.arange(12.0).view(3, 4), mask)
    same(F.vmap(lambda r: r.mean(), in_dims=dim)(x), x.mean(1 if dim == 0 else 0))
    same(F.vmap(lambda r: r + 1, in_dims=dim, out_dims=dim)(x), x + 1)


def test_vmap_of_integers_and_of_bools() -> None:
    x = md.masked_tensor(torch.arange(12).view(3, 4), MASK)
    same(F.vmap(lambda r: r.sum())(x), x.sum(1))
    same(F.vmap(lambda r: (r > 3).any())(x), (x > 3).any(1))


def test_vmap_nests() -> None:
    x = sample()
    same(F.vmap(F.vmap(lambda e: e * 2))(x), x * 2)
    same(F.vmap(F.vmap(lambda e: e * 2, in_dims=0), in_dims=1, out_dims=1)(x), x * 2)


def test_vmap_is_differentiable_from_outside() -> None:
    x = sample(requires_grad=True)
    w = torch.ones(4, dtype=torch.float64, requires_grad=True)
    F.vmap(lambda r: (r.exp() * w).sum())(x).sum().backward()
    y, v = sample(requires_grad=True), w.detach().clone().requires_grad_(True)
    (y.exp() * v).sum(1).sum().backward()
    same((x.grad, w.grad), (y.grad, v.grad))


def test_masked_tensors_may_be_made_and_filled_inside() -> None:
    x = sample()
    data, mask = x.get_data(), x.get_mask()

    def function(data: Tensor, mask: Tensor) -> tuple[Any, ...]:
        y = md.as_masked_tensor(data, mask)
        return y.exp(), y.to_tensor(0.0), y.get_mask(), y.count()

    same(F.vmap(function)(data, mask), (x.exp(), x.to_tensor(0.0), mask, x.count(1)))
    # What is plain at the boundary may go through torch.func itself.
    same(torch.func.vmap(lambda d, m: function(d, m)[1:])(data, mask), (x.to_tensor(0.0), mask, x.count(1)))


def test_random_numbers_follow_randomness() -> None:
    x = md.masked_tensor(torch.ones(2, 64), torch.ones(2, 64, dtype=torch.bool))
    dropped = F.vmap(lambda r: torch.nn.functional.dropout(r, 0.5), randomness="different")(x).to_tensor(9.0)
    assert not torch.equal(dropped[0], dropped[1])
    dropped = F.vmap(lambda r: torch.nn.functional.dropout(r, 0.5), randomness="same")(x).to_tensor(9.0)
    assert torch.equal(dropped[0], dropped[1])


# --------------------------------------------------------------------------------------------- grad and its relatives


def scalar(x: Tensor) -> Tensor:
    return (x.exp() * x).mean(0).sum()


def vector(x: Tensor) -> Tensor:
    return (x * x.sigmoid()).mean(-1)


def reference_gradient(function: Callable[[Tensor], Any], x: md.MaskedTensor) -> Tensor:
    x = x.detach().clone().requires_grad_(True)
    return torch.autograd.grad(function(x), x)[0]


def test_grad_has_the_argument_s_mask() -> None:
    x = sample()
    same(F.grad(scalar)(x), reference_gradient(scalar, x))
    gradient, value = F.grad_and_value(scalar)(x)
    same((gradient, value), (reference_gradient(scalar, x), scalar(x)))


def test_grad_with_argnums_aux_and_plain_arguments() -> None:
    x, w = sample(), torch.full((4,), 0.5, dtype=torch.float64)

    def function(w: Tensor, inputs: dict[str, Tensor]) -> tuple[Tensor, Any]:
        hidden = inputs["x"] * w
        return hidden.sum(), (hidden, hidden.to_tensor(0.0))

    expected = {"x": md.masked_tensor(w.expand(3, 4), MASK)}
    plain = x.to_tensor(0.0).sum(0)
    same(F.grad(function, argnums=1, has_aux=True)(w, {"x": x}), (expected, (x * w, (x * w).to_tensor(0.0))))
    same(F.grad(function, argnums=(0, 1), has_aux=True)(w, {"x": x})[0], (plain, expected))
    same(F.grad(function, argnums=-1, has_aux=True)(w, {"x": x})[0], expected)
    gradients, (value, aux) = F.grad_and_value(function, argnums=0, has_aux=True)(w, {"x": x})
    same((gradients, value, aux[0]), (plain, (x * w).sum(), x * w))


def test_a_loss_with_nothing_valid_has_zero_gradients() -> None:
    x = md.masked_tensor(torch.full((3,), NAN), torch.zeros(3, dtype=torch.bool))
    w = torch.ones(3)
    gradients, value = F.grad_and_value(lambda w, x: (w * x).mean(), argnums=(0, 1))(w, x)
    assert torch.equal(gradients[0], torch.zeros(3))
    assert not gradients[1].get_mask().any()
    assert torch.equal(gradients[1].to_tensor(0.0), torch.zeros(3))
    with pytest.raises(md.InvalidValueError):
        value.item()


def test_vjp_takes_masked_and_plain_cotangents() -> None:
    x = sample()
    output, pull = F.vjp(vector, x)
    same(output, vector(x))
    leaf = x.detach().clone().requires_grad_(True)
    expected = torch.autograd.grad(vector(leaf).sum(), leaf)[0]
    same(pull(torch.ones(3, dtype=torch.float64)), (expected,))
    same(pull(md.masked_tensor(torch.tensor([1.0, NAN, 1.0], dtype=torch.float64), output.get_mask())), (expected,))
    output, pull, aux = F.vjp(lambda x: (vector(x), x * 2), x, has_aux=True)
    same((output, aux), (vector(x), x * 2))


def test_jvp_takes_tangents_as_zero_where_they_are_invalid() -> None:
    x, t = sample(), sample(1)
    output, tangent = F.jvp(vector, (x,), (t,))
    jacobian = F.jacrev(vector)(x)
    directional = (jacobian.to_tensor(0.0) * t.to_tensor(0.0)).sum((1, 2))
    same((output, tangent), (vector(x), md.masked_tensor(directional, output.get_mask())))
    plain = t.to_tensor(7.0)  # what a plain tangent says about invalid elements does not matter
    same(F.jvp(vector, (x,), (plain,))[1], tangent)
    same(F.jvp(lambda x: (vector(x), x), (x,), (t,), has_aux=True)[2], x)


@pytest.mark.parametrize("jacobian", [F.jacrev, F.jacfwd])
def test_jacobians_are_valid_where_output_and_input_are(jacobian: Callable[..., Any]) -> None:
    x, w = sample(), torch.ones(4, dtype=torch.float64)

    def function(x: Tensor, w: Tensor) -> Tensor:
        return (x * x * w).sum(-1)

    result = jacobian(function, argnums=(0, 1))(x, w)
    valid = MASK.any(1)[:, None, None] & MASK
    values = torch.einsum("oi,ij->oij", torch.eye(3, dtype=torch.float64), 2 * x.to_tensor(0.0))
    by_w = x.to_tensor(0.0) ** 2
    same(result, (md.masked_tensor(values, valid), md.masked_tensor(by_w, MASK.any(1)[:, None])))
    same(jacobian(function)(x, w), result[0])
    same(jacobian(lambda x: (function(x, w), x * 3), has_aux=True)(x), (result[0], x * 3))
    same(jacobian(lambda w: w * 2)(w), 2 * torch.eye(4, dtype=torch.float64))


def test_hessian() -> None:
    x = sample()[0]
    result = F.hessian(lambda x: (x**3).mean())(x)
    valid = MASK[0][:, None] & MASK[0]
    values = torch.diag(6 * x.to_tensor(0.0) / 3)
    same(result, md.masked_tensor(values, valid))


def test_transforms_nest() -> None:
    x = sample()

    def function(r: Tensor) -> Tensor:
        return (r**3).mean()

    leaf = x.detach().clone().requires_grad_(True)
    expected = torch.autograd.grad((leaf**3).mean(-1).sum(), leaf)[0]
    same(F.vmap(F.grad(function))(x), expected)
    n = MASK.sum(1, keepdim=True).clamp(min=1)
    second = md.masked_tensor(6 * x.to_tensor(0.0) / n, MASK)
    same(F.vmap(F.grad(lambda r: F.grad(function)(r).sum()))(x), second)
    same(F.grad(lambda x: F.vmap(function)(x).sum())(x), expected)
    tangent = F.jvp(F.grad(function), (x[0],), (torch.ones(4, dtype=torch.float64),))[1]
    same(tangent, second[0])


def test_gradients_through_functional_gradients() -> None:
    x = sample(requires_grad=True)
    (F.grad(lambda x: (x**3).sum())(x) ** 2).sum().backward()
    same(x.grad, (36 * x**3).detach())


# ------------------------------------------------------------------------------------------- views and writes inside


def overwrite(r: Tensor) -> Tensor:
    r = r * 1
    first = r[0]
    first.mul_(3)  # through a view
    r[2] = 5.0  # assigns validity
    return r


def test_writes_inside_show_in_views_and_stay_inside() -> None:
    x = sample()
    mask = x.get_mask()
    expected = x.clone()
    expected[:, 0] *= 3
    expected[:, 2] = 5.0
    same(F.vmap(overwrite)(x), expected)
    assert torch.equal(x.get_mask(), mask)
    factors = torch.tensor([3.0, 1.0, 0.0, 1.0], dtype=torch.float64).expand(3, 4)
    same(F.vmap(F.grad(lambda r: overwrite(r).sum()))(x), md.masked_tensor(factors, MASK))


def test_detach_inside_stops_the_derivative() -> None:
    x = sample()
    same(F.grad(lambda x: (x.detach() * x).sum())(x), x)


def test_a_write_that_needs_a_mask_where_none_is_stored_is_refused() -> None:
    x = md.masked_tensor(torch.ones(2, 3))
    with pytest.raises(md.MaskedSemanticsError, match="inside a functorch transform, this write would change how"):
        F.vmap(lambda r: r[:2].copy_(md.as_masked_tensor(torch.ones(2), torch.tensor([True, False]))))(x)


# ----------------------------------------------------------------------- torch.func itself does not know what masks are


HANDED = {
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(f)(x),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(x),
    "grad of vmap": lambda f, x: torch.func.grad(lambda x: torch.func.vmap(f)(x).sum())(x),
}


OPERATIONS: list[Callable[[Any], Any]] = [lambda x: x.exp(), lambda x: x * 2, lambda x: x.softmax(-1)]


@pytest.mark.parametrize(("name", "function"), zip(HANDED, OPERATIONS * 3, strict=True))
def test_a_masked_tensor_handed_to_torch_func_is_refused(name: str, function: Callable[[Any], Any]) -> None:
    with pytest.raises(md.MaskedSemanticsError, match=r"masked_dispatch\.functional"):
        HANDED[name](function, sample())


@pytest.mark.parametrize("name", HANDED)
def test_a_masked_tensor_returned_to_torch_func_is_refused(name: str) -> None:
    def function(d: Tensor) -> Tensor:
        return md.as_masked_tensor(d, d > 0).exp()

    with pytest.raises(md.MaskedSemanticsError, match=r"masked_dispatch\.functional"):
        HANDED[name](function, torch.rand(2, 3))


def test_what_outlives_its_transform_is_refused() -> None:
    kept = []

    def function(d: Tensor) -> Tensor:
        kept.append(md.as_masked_tensor(d, d > 0))
        return d.sum()

    torch.func.grad(function)(torch.ones(3))
    torch.func.vmap(function)(torch.ones(2, 3))
    for leaked in kept:
        for use in (repr, torch.exp, torch.sum, lambda x: x.get_mask(), lambda x: x.to_tensor(0)):
            with pytest.raises(md.MaskedSemanticsError, match="leaves it"):
                use(leaked)


def test_a_captured_tensor_that_requires_grad_is_refused() -> None:
    x = sample(requires_grad=True)
    with pytest.raises(md.MaskedSemanticsError, match="Pass it as an argument"):
        F.grad(lambda w: (x * w).sum())(torch.ones(4, dtype=torch.float64))
    same(F.grad(lambda w, x: (x * w).sum())(torch.ones(4, dtype=torch.float64), x), x.detach().to_tensor(0.0).sum(0))


def test_a_user_s_autograd_function_on_masked_tensors_is_refused_inside() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x * x

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 2 * ctx.saved_tensors[0] * grad

    with pytest.raises(md.MaskedSemanticsError, match="takes no masked tensors"):
        F.grad(lambda x: Square.apply(x).sum())(sample())


def test_has_aux_needs_a_pair() -> None:
    with pytest.raises(RuntimeError, match="has to return a tuple"):
        F.grad(scalar, has_aux=True)(sample())


def test_in_dims_out_of_range_is_torch_s_own_error() -> None:
    with pytest.raises(ValueError, match="in_dim"):
        F.vmap(lambda x: x, in_dims=5)(sample())


def test_derivatives_in_inference_mode() -> None:
    """Before torch 2.12, torch.func gives zeros there."""

    def all_of() -> list[Any]:
        x = md.masked_tensor(torch.tensor([1.0, NAN, 3.0]), torch.tensor([True, False, True]))
        value, pull = F.vjp(lambda t: (t * t).sum(), x)
        tangents = F.jvp(lambda t: t * t, (x,), (torch.ones(3),))
        jacobians = [F.jacrev(torch.square)(x), F.jacfwd(torch.square)(x), F.hessian(lambda t: (t**3).sum())(x)]
        return [F.grad(lambda t: (t * t).sum())(x), value, *pull(torch.ones(())), *tangents, *jacobians]

    with torch.inference_mode():
        inside = all_of()
    same(inside, all_of())
    assert inside[0].to_tensor(0).tolist() == [2.0, 0.0, 6.0]


def result_or_refusal(call: Callable[[], Tensor], text: str) -> Tensor | None:
    """The result of a call; None if it is refused with a text that matches."""
    try:
        return call()
    except md.MaskedSemanticsError as refusal:
        found = str(refusal)
    assert re.search(text, found)
    return None


def test_derivatives_of_torch_in_inference_mode_are_right_or_refused() -> None:
    """Before torch 2.12, its own transforms give zeros there."""
    x, w = md.masked_tensor(torch.tensor([1.0, NAN, 3.0]), torch.tensor([True, False, True])), torch.ones(3)
    with torch.inference_mode():
        assert torch.func.vmap(lambda w: (w * x).to_tensor(0))(w[None]).tolist() == [[1.0, 0.0, 3.0]]
        found = result_or_refusal(
            lambda: torch.func.grad(lambda w: (w * x).to_tensor(0).sum())(w),
            r"a masked tensor of shape \(3,\) is computed inside a transform of torch.func \(.*\) in inference mode, "
            r"where derivatives are silent zeros in torch \d.*\. Use the transform of the same name from "
            r"masked_dispatch\.functional, or call torch's under torch\.inference_mode\(False\)\.$",
        )
    assert found is None or found.tolist() == [1.0, 0.0, 3.0]


def test_another_dtype_under_vmap_is_right_or_refused() -> None:
    """Before torch 2.13, vmap has no rule for view(dtype)."""
    x = md.masked_tensor(torch.randn(2, 3), MASK[:2, 1:])
    found = result_or_refusal(
        lambda: F.vmap(lambda row: row.view(torch.int16))(x),
        r"vmap of torch \d.* cannot map over this view \(Batching rule not implemented for aten::view\.dtype\)\. View "
        r"the whole batch, before or after vmap, or use a newer torch that has the rule\.$",
    )
    if found is not None:
        same(found, x.view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_vmap_of_unsigned_integers(dtype: torch.dtype) -> None:
    """Of which torch before 2.13 has few kernels, and whose bits its vmap does not view."""
    top = 2 ** (8 * dtype.itemsize) - 1
    x = md.masked_tensor(torch.tensor([[1, 2, top], [3, 4, 5]], dtype=dtype), MASK[:2, 1:])
    padded = F.vmap(lambda row: torch.nn.functional.pad(row, (0, 1)))(x)
    chosen = F.vmap(lambda row: torch.where(row.get_mask(), row, row))(x)
    same((padded, chosen), (torch.nn.functional.pad(x, (0, 1)), x))
    assert F.vmap(lambda row: row.to_tensor(7))(x).tolist() == [[1, 7, top], [7, 7, 7]]
