"""In-place operators whose results are logical: torch records none of them, not even a write to a leaf."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import masked_dispatch as md

LOGICAL = ["logical_not_", "logical_and_", "logical_or_", "logical_xor_"]


def masked(data: Tensor) -> md.MaskedTensor:
    """All valid."""
    return md.masked_tensor(data)


def plain(data: Tensor) -> Tensor:
    """The tensor itself."""
    return data


def check_write_to_leaf(
    name: str, made: Callable[[Tensor], Tensor], run: Callable[[Callable[[Tensor], None]], Callable[[Tensor], None]]
) -> None:
    """The write, as `run` gives it, changes the leaf and its version, and nothing else of it."""
    operands = () if name == "logical_not_" else (torch.tensor([1.0, 0.0, 1.0]),)
    leaf = made(torch.tensor([1.0, 0.0, 0.0])).requires_grad_()

    def write(x: Tensor) -> None:
        getattr(x, name)(*operands)

    run(write)(leaf)
    assert leaf.requires_grad
    assert leaf.is_leaf
    assert leaf._version == 1
    wanted = getattr(torch.tensor([1.0, 0.0, 0.0]), name)(*operands)
    assert leaf.detach().tolist() == wanted.tolist()
