"""One call of a sample with its tensors on a device: the results, and the gradients on demand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from op_registry.conformance.masks import masking
from op_registry.conformance.randomness import start_random_numbers
from op_registry.conformance.sample import Sample
from op_registry.conformance.subject import Subject
from op_registry.conformance.trees import tree_leaves

What = Literal["results", "gradients"]


@dataclass(frozen=True)
class Brought:
    """A tensor of a result, brought to the CPU unless its device holds no values."""

    data: Tensor
    mask: Tensor | None
    device: str
    mask_device: str | None

    @classmethod
    def of(cls, data: Tensor, mask: Tensor | None) -> Brought:
        if mask is None:
            return cls(_on_cpu(data), None, data.device.type, None)
        return cls(_on_cpu(data), _on_cpu(mask), data.device.type, mask.device.type)


def _on_cpu(tensor: Any) -> Tensor:
    if tensor.device.type == "jax":  # asked first: torchax's tensors have the device meta underneath
        return tensor._env.j2t_copy(tensor.jax())
    tensor = tensor.detach()
    return tensor if tensor.is_meta else tensor.cpu()


@dataclass(frozen=True)
class Operand:
    """The data of one of the sample's tensors, and its mask; None if all elements are valid."""

    data: Tensor
    mask: Tensor | None
    masked: bool

    def to(self, device: torch.device) -> Operand:
        return Operand(self.data.to(device), None if self.mask is None else self.mask.to(device), self.masked)


def operands(sample: Sample, kind: str | None, seed: int = 0) -> list[Operand]:
    """The sample's tensors under masks of a kind; with `kind` None, all are plain."""
    copies = [tensor.detach().clone() for tensor in sample.tensors]
    laid = None if kind is None else masking(kind, sample.tensors, seed)
    if laid is None:
        return [Operand(data, None, False) for data in copies]
    masks = [mask if isinstance(mask, Tensor) else None for mask in laid.masks]
    return [Operand(data, mask, True) for data, mask in zip(copies, masks, strict=True)]


class Call:
    """A sample called on operands, which lie on one device."""

    def __init__(self, sample: Sample, subject: Subject, operands: Sequence[Operand]) -> None:
        self.subject = subject
        self.made: list[Any] = []

        def made(tensor: Tensor) -> Any:
            position = len(self.made)
            operand, wanted = operands[position], _differentiated(sample, position, tensor)
            if operand.masked:
                self.made.append(subject.wrap(operand.data, operand.mask, wanted))
            else:
                self.made.append(operand.data.requires_grad_(wanted))
            return self.made[-1]

        args, kwargs = sample.with_tensors(made)
        start_random_numbers(0)
        self.result = subject.call(sample.fn, *args, **kwargs)
        self.differentiated = sample.differentiable_part(self.result)

    def observed(self, what: What) -> list[Any]:
        """The data and mask of each tensor among the results, or the gradients; other values as they are."""
        leaves = self._results() if what == "results" else self._gradients()
        return [self.subject.observe(leaf) if self.subject.is_value(leaf) else leaf for leaf in leaves]

    def _results(self) -> list[Any]:
        """Every leaf of the result."""
        return tree_leaves(self.result, is_leaf=self.subject.is_value)

    def _gradients(self) -> list[Any]:
        """The gradients of the sum of all squares.

        The sum uses each result twice, so that the autograd engine adds gradients.
        """
        squares = [
            (leaf * leaf.conj()).real.sum() if leaf.is_complex() else (leaf * leaf).sum()
            for leaf in tree_leaves(self.differentiated, is_leaf=self.subject.is_value)
            if self.subject.is_value(leaf) and self.subject.requires_grad(leaf)
        ]
        inputs = [value for value in self.made if self.subject.requires_grad(value)]
        if not squares or not inputs:
            return []
        ones = [torch.ones_like(square) for square in squares]
        return list(torch.autograd.grad(squares, inputs, ones, allow_unused=True))


def _differentiated(sample: Sample, position: int, tensor: Tensor) -> bool:
    """Whether to differentiate by a tensor of the sample."""
    known = sample.variables is None or position in sample.variables
    return sample.differentiable and known and (tensor.is_floating_point() or tensor.is_complex())
