"""What masked_dispatch/torchax/internals.py assumes of torchax, by number; run as tests_on_torchax.py is."""

from __future__ import annotations

import importlib

import jax.numpy as jnp
import pytest
import torch
import torchax
import torchax.tensor
import torchax.view
from jax.core import Tracer
from torch import Tensor
from torchax.interop import jax_jit, jax_view, torch_view

from masked_dispatch.torchax import internals

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")


def test_1_a_torchax_tensor_is_on_meta_to_cpp_and_on_jax_to_python() -> None:
    with torchax.default_env():
        x = torch.ones(3).to("jax")
        view = x[1:]
    assert internals.tensor_types(torchax) == (type(x), type(view)) == (torchax.tensor.Tensor, torchax.view.View)
    for tensor in (x, view):
        assert tensor.device == torch.device("jax:0")
        assert Tensor.device.__get__(tensor) == internals.DEVICE_IN_CPP


def test_2_two_modes_see_every_call_and_are_looked_up_in_their_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def seeing(mode: type, name: str) -> None:
        served = getattr(mode, name)

        def see(self: object, func: object, *rest: object) -> object:
            seen.append((name, str(func)))
            return served(self, func, *rest)

        monkeypatch.setattr(mode, name, see)

    seeing(torchax.tensor.XLAFunctionMode, "__torch_function__")
    seeing(torchax.tensor.XLADispatchMode, "__torch_dispatch__")
    with torchax.default_env():
        torch.ops.aten.sin(torch.ones(3))
    assert [name for name, func in seen if "sin" in func] == ["__torch_function__", "__torch_dispatch__"]


def test_3_the_dispatch_mode_can_be_entered_again() -> None:
    with torchax.default_env():
        x = torch.ones(3).to("jax")
    with pytest.raises(AssertionError, match="within the torchax environment"):
        x.sin()
    with internals.operators_of(x):
        with internals.operators_of(x):
            y = x.sin()
        assert isinstance(y.cos(), torchax.tensor.Tensor)


def test_4_a_tensor_holds_an_array_that_writes_replace_and_views_copy() -> None:
    with torchax.default_env():
        x = torch.ones(2, 3).to("jax")
        before, view = x.jax(), torch.ops.aten.select(x, 0, 0)
        version = x._version
        x.copy_(x + 1)
    assert x._version == version + 1
    assert (before.tolist()[0], view.tolist(), x.tolist()[0]) == ([1, 1, 1], [1, 1, 1], [2, 2, 2])
    assert internals.has_array(x)
    assert internals.to_cpu(x).add_(1).equal(torch.full((2, 3), 3.0))
    assert x.tolist()[0] == [2, 2, 2]


def test_5_tensors_are_leaves_of_what_crosses_to_jax_and_other_things_stay() -> None:
    kinds = []

    def traced(x: Tensor) -> Tensor:
        kinds.append((isinstance(x.jax(), Tracer), internals.has_array(x)))
        return x

    with torchax.default_env():
        x = torch.ones(3).to("jax")
        jax_jit(traced)(x)
    assert kinds == [(True, False)]
    there = jax_view({"x": x, "word": "as it is"})
    assert there["x"] is x.jax()
    assert isinstance(torch_view(there)["x"], torchax.tensor.Tensor)
    assert torch_view(there)["word"] == "as it is"


def test_6_a_slice_of_a_last_dimension_is_not_differentiated_by_torchax_itself() -> None:
    lowering = torchax.ops.ops_registry.all_aten_ops[torch.ops.aten.slice_scatter]
    mended = lowering.func
    lowering.func = getattr(mended, "__wrapped__", mended)
    try:
        with torchax.default_env():
            x, row = torch.zeros(2, 3).to("jax"), torch.ones(2, 2).to("jax")
            with pytest.raises(ValueError, match="Incompatible types for broadcasting"):
                torch.ops.aten.slice_scatter(x, row, -1, 0, 2)
            internals.mend_slice_scatter(torchax)
            assert torch.ops.aten.slice_scatter(x, row, -1, 0, 2).tolist() == [[1, 1, 0], [1, 1, 0]]
    finally:
        lowering.func = mended


@pytest.mark.parametrize("name", ["_linalg_slogdet", "_linalg_solve_ex"])
def test_7_a_lowering_returns_fewer_results_than_its_operator_has(name: str) -> None:
    lowering = importlib.import_module("torchax.ops.jaten").__dict__["_aten_" + name]
    array = jnp.eye(2)
    given = (array,) if name == "_linalg_slogdet" else (array, array)
    returned = len(getattr(torch.ops.aten, name).default._schema.returns)
    assert len(lowering(*given)) < returned
    internals.refuse_short(torchax)
    with torchax.default_env():
        x = torch.eye(2).to("jax")
        with pytest.raises(torchax.tensor.OperatorNotFound, match=f"of aten.{name} returns too few"):
            getattr(torch.ops.aten, name)(*(x,) * len(given))


def test_another_release_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals, "CHECKED", "0.0.1")
    with pytest.warns(UserWarning, match=r"was checked with torchax 0.0.1, and this is 0.0.14.dev\d+: run the tests"):
        internals.import_torchax()
