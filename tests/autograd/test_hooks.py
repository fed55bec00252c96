"""P5 for hooks: they get masked gradients of masked tensors, and what they return is masked on the way.

A leaf's `.grad` is masked whoever gave a plain gradient: an autograd function, a hook of the tensor, of a module, of a
node, after accumulation, or an assignment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import masked_dispatch as md
from functions_of_others import MASK, STORAGES, Triple, masked

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")


def everywhere(gradient: Tensor) -> Tensor:
    """A plain gradient that says 3 of every element."""
    assert isinstance(gradient, md.MaskedTensor)
    return torch.full(gradient.shape, 3.0)


def by_tensor_hook(x: Tensor) -> Tensor:
    x.register_hook(everywhere)
    return x * 1


def by_hook_on_a_result(x: Tensor) -> Tensor:
    y = x * 1
    y.register_hook(everywhere)
    return y


def by_hook_after_accumulation(x: Tensor) -> Tensor:
    def assign(leaf: Tensor) -> None:
        leaf.grad = everywhere(leaf.grad)  # type: ignore[arg-type]

    x.register_post_accumulate_grad_hook(assign)
    return x * 1


def by_hook_of_a_module(x: Tensor) -> Tensor:
    module = nn.Identity()
    module.register_full_backward_hook(lambda module, inputs, outputs: tuple(everywhere(grad) for grad in inputs))
    return module(x)


def by_hook_before_a_module(x: Tensor) -> Tensor:
    module = nn.Identity()
    module.register_full_backward_pre_hook(lambda module, outputs: tuple(everywhere(grad) for grad in outputs))
    return module(x)


def by_hook_of_a_node(x: Tensor) -> Tensor:
    y = Triple.apply(x)
    y.grad_fn.register_hook(lambda inputs, outputs: tuple(everywhere(grad) for grad in inputs))
    return y


def by_a_function(x: Tensor) -> Tensor:
    return Triple.apply(x)


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    name.removeprefix("by_"): way for name, way in list(globals().items()) if name.startswith("by_")
}


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_of_a_leaf_is_masked(way: str, storage: torch.layout) -> None:
    x = masked(storage)
    WAYS[way](x).sum().backward()
    assert isinstance(x.grad, md.MaskedTensor)
    assert torch.equal(x.grad.to_dense().get_mask(), MASK)
    assert x.grad.to_tensor(0.0).tolist() == (3.0 * MASK).tolist()


@pytest.mark.parametrize("way", WAYS)
def test_the_norm_of_gradients_counts_valid_elements(way: str) -> None:
    x = masked(torch.strided)
    WAYS[way](x).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_([x], 3.0)
    assert norm.item() == pytest.approx(6.0)  # of four elements
    assert x.grad is not None
    assert x.grad.to_tensor(0.0).sum().item() == pytest.approx(6.0, rel=1e-5)


@pytest.mark.parametrize("way", ["tensor_hook", "hook_on_a_result", "a_function"])
def test_gradients_that_are_asked_for_are_masked(way: str) -> None:
    x = masked(torch.strided)
    (gradient,) = torch.autograd.grad(WAYS[way](x).sum(), x)
    assert isinstance(gradient, md.MaskedTensor)
    assert torch.equal(gradient.get_mask(), MASK)


def test_a_plain_root_reaches_a_hook_masked() -> None:
    seen: list[Any] = []
    x = masked(torch.strided)
    y = x * 2
    y.register_hook(seen.append)
    x.register_hook(seen.append)
    y.backward(torch.ones(2, 4))
    assert [torch.equal(gradient.get_mask(), MASK) for gradient in seen] == [True, True]


def test_what_others_put_into_grad_is_read_masked_and_shares_memory() -> None:
    x, bucket = masked(torch.strided), torch.ones(2, 4)
    x.grad = bucket
    assert isinstance(x.grad, md.MaskedTensor)
    assert x.grad is x.grad
    x.grad.mul_(2)
    assert bucket[MASK].tolist() == [2, 2, 2, 2]
    (x * 3).sum().backward()
    assert x.grad.to_tensor(0.0).tolist() == (5.0 * MASK).tolist()
    del x.grad
    assert x.grad is None


def test_a_hook_can_be_removed() -> None:
    x = masked(torch.strided)
    x.register_hook(everywhere).remove()
    x.sum().backward()
    assert x.grad is not None
    assert x.grad.to_tensor(0.0).tolist() == MASK.float().tolist()


def test_a_hook_that_returns_no_tensor_is_refused_as_in_torch() -> None:
    x = masked(torch.strided)
    x.register_hook(lambda gradient: 3)  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match="expected Variable, but hook returned 'int'"):
        x.sum().backward()
