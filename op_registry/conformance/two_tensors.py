"""The control of P7: torch's own TwoTensor, a wrapper of two tensors without a meaning of its own, in the same mode.

If TwoTensor fails too, the fault is torch's, and a gap may say so (``Gap(…, upstream=True)``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from op_registry.conformance.subject import Observed, Subject


class TwoTensors(Subject):
    """Calls as another subject does, on TwoTensors in place of masked tensors."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.name = f"TwoTensor, {subject.name}"

    def wrap(self, data: Tensor, mask: Tensor | None, requires_grad: bool = False) -> Any:
        return TwoTensor(data.clone(), data.clone()).requires_grad_(requires_grad)

    def observe(self, value: Any) -> Observed:
        return value, None

    def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.subject.call(fn, *args, **kwargs)


def first_of_two(value: object) -> object:
    """The first tensor of an observed TwoTensor; other values unchanged."""
    if isinstance(value, tuple) and isinstance(value[0], TwoTensor):
        return value[0].a.detach(), value[1]
    return value
