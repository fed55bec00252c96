"""What the tests of masked tensors on torchax tensors share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torchax
from torch import Tensor

import masked_dispatch as md

md.torchax.enable()

# What jax and torchax warn of, for plain tensors too: 64 bits become 32, and memory of jax is shared with torch.
IGNORED = [
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype"),
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable"),
]

MASK = torch.tensor([[True, False, True, True], [False, False, True, True], [False, False, False, False]])


@pytest.fixture(autouse=True)
def in_environment() -> Iterator[None]:
    torch.manual_seed(0)
    with torchax.default_env():
        yield


def on_cpu(mask: Tensor = MASK, **options: Any) -> Any:
    data = torch.arange(1.0, 13.0).reshape(3, 4) / 4
    return md.masked_tensor(data.masked_fill(~mask, torch.nan), mask, **options)


def on_jax(mask: Tensor = MASK) -> Any:
    return on_cpu(mask).to("jax")


def same(mine: Any, theirs: Any) -> None:
    """Whether values and mask are those of a masked tensor on the CPU."""
    assert mine.device.type == "jax"
    md.testing.assert_close(mine.cpu(), theirs, rtol=1e-5, atol=1e-5)
