"""Functions and modules compiled by TorchScript mean what they mean in Python, or refuse masked tensors."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import masked_dispatch as md

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
MASK = torch.tensor([[True, True, False], [True, False, False]])


def mean_of_tanh(x: Tensor) -> Tensor:
    return torch.tanh(x * 2).mean()


def divergence(x: Tensor) -> Tensor:
    return F.kl_div(x, torch.full((2, 3), 0.5), reduction="batchmean")


def norm_of_windows(x: Tensor) -> Tensor:
    return F.lp_pool2d(x[None], 2.0, [1, 2])


def sum_of_all(xs: list[Tensor]) -> Tensor:
    return (xs[0] + xs[1]).sum()


FUNCTIONS = [mean_of_tanh, divergence, norm_of_windows]
COMPILED: dict[str, Callable[[Any], Any]] = {
    "script": torch.jit.script,
    "trace": lambda function: torch.jit.trace(function, torch.ones(2, 3)),
}
STORAGES = {"dense": lambda x: x, "csr": md.MaskedTensor.to_sparse_csr}


@pytest.fixture(params=FUNCTIONS, ids=lambda function: function.__name__)
def function(request: pytest.FixtureRequest) -> Callable[[Tensor], Tensor]:
    return request.param  # type: ignore[no-any-return]


def leaf() -> md.MaskedTensor:
    return md.masked_tensor(torch.tensor([[1.0, 2.0, torch.nan], [3.0, torch.nan, 1e30]]), MASK, requires_grad=True)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("how", COMPILED)
def test_a_compiled_function_is_the_python_function(
    function: Callable[[Tensor], Tensor], how: str, storage: str
) -> None:
    """Called several times: TorchScript optimises, and differentiates by its own formulas, after some calls."""
    compiled = COMPILED[how](function)
    for _ in range(3):
        x, y = leaf(), leaf()
        found, expected = compiled(STORAGES[storage](x)), function(STORAGES[storage](y))
        assert torch.equal(found, expected)
        found.sum().backward()
        expected.sum().backward()
        assert torch.equal(x.grad, y.grad)


@pytest.mark.parametrize("how", COMPILED)
def test_plain_tensors_are_passed_on(function: Callable[[Tensor], Tensor], how: str) -> None:
    compiled = COMPILED[how](function)
    compiled._torchdynamo_inline = None  # nothing else to run
    x = torch.rand(2, 3)
    torch.testing.assert_close(compiled(x), function(x))
    torch.testing.assert_close(compiled(x=x), function(x))


def test_masked_tensors_in_lists() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.jit.script(sum_of_all)
    x, y = leaf(), torch.zeros(2, 3)
    assert compiled([y, x]).item() == compiled(xs=[x, y]).item() == 6


class Net(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return mean_of_tanh(x)


class NetOfTwo(Net):
    @torch.jit.export
    def again(self, x: Tensor) -> Tensor:
        return self.forward(x)


def loaded(module: Any) -> Any:
    buffer = io.BytesIO()
    torch.jit.save(module, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.jit.script(Net()),
        lambda: torch.jit.script(NetOfTwo()).again,
        lambda: torch.jit.trace(Net(), torch.ones(2, 3)),
        lambda: loaded(torch.jit.script(Net())),
        lambda: torch.jit.freeze(torch.jit.script(Net()).eval()),
    ],
    ids=["script", "method", "trace", "load", "freeze"],
)
def test_a_module_refuses_masked_tensors(make: Callable[[], Any]) -> None:
    module = make()
    with pytest.raises(
        md.MaskedSemanticsError,
        match=r"(forward|again) of a TorchScript module is called with a masked tensor.*Call the Python module",
    ):
        module(leaf())
    torch.testing.assert_close(module(torch.ones(2, 3)), mean_of_tanh(torch.ones(2, 3)))
