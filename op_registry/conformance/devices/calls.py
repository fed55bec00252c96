"""One call of a sample with its tensors on a device: the results, and the gradients on demand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.masks import masking
from op_registry.conformance.randomness import start_random_numbers
from op_registry.conformance.sample import Sample
from op_registry.conformance.subject import Subject
from op_registry.conformance.trees import tree_leaves


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
            return cls(_brought(data), None, data.device.type, None)
        return cls(_brought(data), _brought(mask), data.device.type, mask.device.type)


def _brought(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor if tensor.is_meta else tensor.cpu()


class Call:
    """A sample called on a device, with masks of a kind on all its tensors; with `kind` None, all are plain."""

    def __init__(self, sample: Sample, subject: Subject, device: torch.device, kind: str | None) -> None:
        self.subject = subject
        self.made: list[Any] = []
        laid = masking(kind, sample.tensors) if kind is not None else None

        def moved(tensor: Tensor) -> Any:
            position = len(self.made)
            wanted = _differentiated(sample, position, tensor)
            data = tensor.detach().clone().to(device)
            if laid is None:
                self.made.append(data.requires_grad_(wanted))
            else:
                mask = laid.masks[position]
                self.made.append(subject.wrap(data, mask.to(device) if isinstance(mask, Tensor) else None, wanted))
            return self.made[-1]

        args, kwargs = sample.with_tensors(moved)
        start_random_numbers(0)
        self.result = subject.call(sample.fn, *args, **kwargs)
        self.differentiated = sample.differentiable_part(self.result)

    def results(self) -> list[Any]:
        """Every leaf of the result; a tensor as Brought."""
        return [self._brought(leaf) for leaf in tree_leaves(self.result, is_leaf=self.subject.is_value)]

    def gradients(self) -> list[Any]:
        """The gradients of the sum of all squares.

        Each result is used twice in it, so that gradients meet in the autograd engine.
        """
        squares = [
            (leaf * leaf.conj()).real.sum() if leaf.is_complex() else (leaf * leaf).sum()
            for leaf in tree_leaves(self.differentiated, is_leaf=self.subject.is_value)
            if self.subject.is_value(leaf) and self.subject.requires_grad(leaf)
        ]
        inputs = [value for value in self.made if self.subject.requires_grad(value)]
        if not squares or not inputs:
            return []
        found = torch.autograd.grad(squares, inputs, [torch.ones_like(s) for s in squares], allow_unused=True)
        return [self._brought(gradient) for gradient in found]

    def _brought(self, leaf: Any) -> Any:
        return Brought.of(*self.subject.observe(leaf)) if self.subject.is_value(leaf) else leaf


def _differentiated(sample: Sample, position: int, tensor: Tensor) -> bool:
    """Whether to differentiate by a tensor of the sample."""
    known = sample.variables is None or position in sample.variables
    return sample.differentiable and known and (tensor.is_floating_point() or tensor.is_complex())
