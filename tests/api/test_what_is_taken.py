"""Every public function says what it takes: a TypeError for what is no tensor, and torch's errors for dimensions.

The functions are looked up in the tests: that of a door loads the library that the door leads to.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from masked_dispatch import interop, metrics, missing

MODULES: tuple[ModuleType, ...] = (md, missing, metrics, interop)
# What an argument of a function is, by its name, where that is no padded batch of shape (2, 3).
GIVEN: dict[str, Any] = {
    "k": 1,
    "q": 0.5,
    "dim": 1,
    "periods": 1,
    "window": 2,
    "threshold": 0.5,
    "value": 0.0,
    "labels": torch.tensor([0, 1]),
    "lengths": torch.tensor([3, 1]),
    "mask": torch.ones(2, 3, dtype=torch.bool),
    "condition": torch.ones(2, 3, dtype=torch.bool),
    "attention_mask": torch.ones(2, 3, dtype=torch.bool),
    "key_padding_mask": torch.zeros(2, 3, dtype=torch.bool),
    "target": torch.ones(2, 3, dtype=torch.int64),
    "predicted": torch.ones(2, 3, dtype=torch.int64),
}
NO_TENSORS = (None, object(), "text")


def batch() -> Tensor:
    return md.from_lengths(torch.ones(2, 3), torch.tensor([3, 1]))


def functions(module: ModuleType) -> Iterator[Callable[..., Any]]:
    yield from (f for name in module.__all__ if inspect.isfunction(f := getattr(module, name)))


def parameters(function: Callable[..., Any]) -> dict[str, str]:
    """The annotations of a function's parameters, by name."""
    return {name: str(p.annotation) for name, p in inspect.signature(function).parameters.items()}


def arguments(function: Callable[..., Any], **changed: Any) -> dict[str, Any]:
    """Those that have to be given, and some that are changed."""
    required = [
        name
        for name, p in inspect.signature(function).parameters.items()
        if p.default is p.empty and p.kind != p.VAR_POSITIONAL
    ]
    return {name: GIVEN[name] if name in GIVEN else batch() for name in required} | changed


def takers_of_tensors(module: ModuleType) -> list[tuple[Callable[..., Any], str]]:
    """Functions, each with the name of a parameter that is a tensor."""
    kinds = ("Tensor", "T", "MaskedTensor", "ArrayLike")
    return [(f, name) for f in functions(module) for name, kind in parameters(f).items() if kind in kinds]


def takers_of_dims(module: ModuleType) -> list[Callable[..., Any]]:
    return [
        f for f in functions(module) if "dim" in parameters(f) and "Iterable" not in next(iter(parameters(f).values()))
    ]


def called(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    """A call with its first arguments by position, as torch's functions want them."""
    positional = [
        given.pop(name)
        for name, p in inspect.signature(function).parameters.items()
        if name in given and p.kind is not p.KEYWORD_ONLY and name != "dim"
    ]
    return function(*positional, **given)


each_module = pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)


@each_module
def test_what_is_no_tensor_is_a_type_error(module: ModuleType, subtests: pytest.Subtests) -> None:
    for function, name in takers_of_tensors(module):
        with subtests.test(function=function.__name__, name=name):
            for value in NO_TENSORS:
                with pytest.raises(TypeError, match=r"(?i)tensor") as raised:
                    called(function, arguments(function, **{name: value}))
                assert "has no attribute" not in str(raised.value)


@each_module
def test_dimensions_are_checked_as_torch_checks_them(module: ModuleType, subtests: pytest.Subtests) -> None:
    for function in takers_of_dims(module):
        with subtests.test(function=function.__name__):
            for dim in (2, -3, 7):
                with pytest.raises(IndexError, match="out of range"):
                    called(function, arguments(function, dim=dim))
            for no_dim in (True, 1.0, "a"):
                # (A string may be the name of a dimension, which releases with named tensors look for.)
                refusal = (TypeError, RuntimeError) if no_dim == "a" else TypeError
                with pytest.raises(refusal, match=r"int|dimname|Name 'a' not found") as raised:
                    called(function, arguments(function, dim=no_dim))
                assert "has no attribute" not in str(raised.value)


def test_the_functions_are_those_that_exist() -> None:
    assert sum(len(takers_of_tensors(module)) for module in MODULES) > 80
    assert {md.from_lengths, md.padded, md.first, interop.to_lengths, missing.dropna} <= {
        function for module in MODULES for function in takers_of_dims(module)
    }
