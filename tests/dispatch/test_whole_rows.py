"""Without derivatives an operator on each row by itself runs on the data as it is, where rows are valid as a whole.

That its results are the rule's, whatever lies in other rows and in holes, the laws ask (P2 and P3).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import profile

import masked_dispatch as md

B, T, D = 2, 5, 4
WEIGHT, BIAS = torch.randn(3, D, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
SCALE, SHIFT = torch.randn(D, dtype=torch.float64), torch.randn(D, dtype=torch.float64)
# Each on rows of D numbers; the name is that of the operator of torch that runs.
OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, WEIGHT, BIAS),
    "matmul": lambda x: torch.matmul(x, WEIGHT.t()),
    "layer_norm": lambda x: F.layer_norm(x, (D,), SCALE, SHIFT),
    "rms_norm": lambda x: F.rms_norm(x, (D,), SCALE),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
}


def operators_in(call: Callable[[], object]) -> list[str]:
    """The names of torch's operators in a call. (A dispatch mode would turn the fast paths off.)"""
    with profile(acc_events=True) as seen:
        call()
    return [event.name.removeprefix("aten::") for event in seen.events() if event.name.startswith("aten::")]


def batch(lengths: list[int], hidden: float) -> md.MaskedTensor:
    """A padded batch (B, T, D) with `hidden` in its padding, one validity for each row."""
    data = torch.randn(B, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(T) < torch.tensor(lengths)[:, None]
    return md.as_masked_tensor(torch.where(mask[..., None], data, hidden), mask[..., None])


def test_a_window_in_zeros_around_an_invalid_sample_is_valid() -> None:
    """A convolution has no rows of this kind: such windows read nothing of the sample."""
    x = md.as_masked_tensor(torch.ones(2, 1, 4), torch.tensor([True, False])[:, None, None])
    with torch.no_grad():
        found = F.conv1d(x, torch.ones(1, 1, 2), None, 1, 3)
    assert found.get_mask()[1, 0].tolist() == [True, True, *[False] * 5, True, True]


@pytest.mark.parametrize("name", OPERATORS)
def test_nothing_is_filled(name: str) -> None:
    call, x = OPERATORS[name], batch([3, 5], torch.nan)
    data = x.get_data()
    with torch.no_grad():
        assert operators_in(lambda: call(x)) == operators_in(lambda: call(data))
        assert call(x)._stored_validity.shape == (B, T, 1)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", OPERATORS)
def test_a_hole_inside_a_row_is_filled(name: str) -> None:
    data, mask = torch.randn(B, T, D, dtype=torch.float64), torch.ones(B, T, D, dtype=torch.bool)
    mask[0, 0, 1] = False
    with torch.no_grad():
        found = [OPERATORS[name](md.as_masked_tensor(torch.where(mask, data, h), mask)) for h in (0.0, torch.nan)]
    md.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    assert bool(found[1].to_tensor(0).isfinite().all())


@pytest.mark.parametrize("parameter", ["weight", "bias"])
def test_derivatives_of_parameters_do_not_see_hidden_rows(parameter: str) -> None:
    parameters = {"weight": WEIGHT.clone(), "bias": BIAS.clone()}
    leaf = parameters[parameter].requires_grad_()
    F.linear(batch([3, 5], torch.nan), **parameters).sum().backward()
    assert leaf.grad is not None
    assert bool(leaf.grad.isfinite().all())


def test_masked_weights_take_the_rule() -> None:
    weight = md.as_masked_tensor(WEIGHT, torch.arange(D) > 0)
    with torch.no_grad():
        found = F.linear(batch([3, 5], torch.nan), weight, BIAS)
        expected = F.linear(batch([3, 5], torch.nan), WEIGHT * (torch.arange(D) > 0), BIAS)
    md.testing.assert_close(found, expected)


@pytest.mark.parametrize("size", [(0, T, D), (B, 0, D), (B, T, 0)], ids=str)
def test_empty_rows_and_batches_are_those_of_the_rule(size: tuple[int, ...]) -> None:
    x = md.as_masked_tensor(torch.empty(size), torch.zeros(*size[:2], 1, dtype=torch.bool))
    weight = torch.ones(3, size[-1])
    with torch.no_grad():
        fast = F.linear(x, weight)
    md.testing.assert_close(fast, F.linear(x.detach().requires_grad_(), weight).detach())


def test_shapes_that_do_not_match_raise_torchs_own_error() -> None:
    x = batch([3, 5], torch.nan)
    for call in (lambda t: F.linear(t, torch.ones(3, D + 1).double()), lambda t: F.layer_norm(t, (D + 1,))):
        with pytest.raises(RuntimeError) as plain:
            call(x.get_data())
        with torch.no_grad(), pytest.raises(RuntimeError) as masked:
            call(x)
        assert str(masked.value) == str(plain.value)


@pytest.mark.parametrize("name", OPERATORS)
def test_packed_rows_run_at_once(name: str) -> None:
    call, x = OPERATORS[name], batch([3, 5], torch.nan).to_packed()
    with torch.no_grad(), md.densify("never"):
        fast = call(x)
    assert fast.storage_layout is torch.jagged
    md.testing.assert_close(fast.to_dense(), call(batch([3, 5], 0.0)).detach())


def test_a_positive_dimension_of_packed_storage_is_that_of_the_tensor() -> None:
    x = batch([3, 5], 0.0)
    for dim in (1, 2):
        with torch.no_grad():
            md.testing.assert_close(x.to_packed().softmax(dim).to_dense(), x.softmax(dim))


def test_attention_of_whole_queries_fills_keys_and_values_alone() -> None:
    found = []
    for hidden in (0.0, torch.nan, torch.inf):
        x = batch([3, 5], hidden).unsqueeze(1)
        with torch.no_grad():
            found.append(F.scaled_dot_product_attention(x, x, x))
    for other in found[1:]:
        md.testing.assert_close(other, found[0], rtol=0, atol=0)
