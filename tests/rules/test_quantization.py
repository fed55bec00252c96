"""Fake quantisation, assertions and pinned memory of masked tensors."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import masked_dispatch as md

KNOWN = torch.tensor([[True, False, True], [False, True, True]])
DATA = torch.tensor([[1.13, 9.0, 3.0], [0.5, -2.26, 100.0]])
CHANNELS = torch.tensor([0.1, 0.2, 0.3])
ZEROS = torch.zeros(3, dtype=torch.int32)
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "numbers": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127),
    "tensors": lambda x: torch.fake_quantize_per_tensor_affine(x, CHANNELS[:1], ZEROS[:1], -128, 127),
    "channels": lambda x: torch.fake_quantize_per_channel_affine(x, CHANNELS, ZEROS, 1, -128, 127),
}
STORAGES: dict[str, Callable[[Any], Any]] = {"dense": lambda x: x, "coo": lambda x: x.to_sparse()}


@pytest.mark.parametrize("hidden", [float("nan"), float("inf"), 1e38])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", CALLS)
def test_fake_quantisation_is_elementwise(name: str, storage: str, hidden: float) -> None:
    x = md.masked_tensor(torch.where(KNOWN, DATA, hidden), KNOWN, requires_grad=True)
    plain = DATA.clone().requires_grad_()
    got, want = CALLS[name](STORAGES[storage](x)), CALLS[name](plain)
    assert got.get_mask().equal(KNOWN)
    assert got.to_tensor(0).equal(torch.where(KNOWN, want, 0))
    got.sum().backward()
    torch.where(KNOWN, want, 0).sum().backward()
    assert x.grad.get_mask().equal(KNOWN)
    assert x.grad.to_tensor(0).equal(plain.grad)


def test_an_invalid_scale_makes_its_channel_invalid() -> None:
    scale = md.masked_tensor(CHANNELS, torch.tensor([True, True, False]))
    got = torch.fake_quantize_per_channel_affine(DATA, scale, ZEROS, 1, -128, 127)
    assert got.get_mask().tolist() == [[True, True, False]] * 2
    one = torch.fake_quantize_per_tensor_affine(DATA, scale[2:], ZEROS[:1], -128, 127)
    assert not one.get_mask().any()


def test_an_assertion_of_an_invalid_number_fails() -> None:
    x = md.masked_tensor(torch.ones(2), torch.tensor([True, False]))
    torch._assert_async(x[0])
    with pytest.raises(RuntimeError, match="got zero"):
        torch._assert_async(x[1])


def test_pinned_memory_needs_an_accelerator_as_in_torch() -> None:
    x = md.masked_tensor(DATA, KNOWN)
    assert not x.is_pinned()
    if torch.accelerator.is_available():
        assert x.pin_memory().is_pinned()
        assert x.pin_memory().get_mask().equal(KNOWN)
        return
    with pytest.raises(RuntimeError) as plain:
        DATA.pin_memory()
    with pytest.raises(RuntimeError, match=re.escape(str(plain.value))):
        x.pin_memory()
