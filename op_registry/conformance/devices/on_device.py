"""A subject on another device: the laws run there, and compare what comes back with oracles on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.devices.comparison import Comparison
from op_registry.conformance.sample import Sample
from op_registry.conformance.subject import Observed, Subject


class OnDevice(Subject):
    """Another subject, whose tensors lie on a device: they are put there when they are wrapped, and brought to the CPU
    when they are observed. Plain torch, with which P1 compares bit for bit, runs there too.
    """

    def __init__(self, subject: Subject, device: torch.device) -> None:
        self.subject, self.device = subject, device
        self.name = f"{subject.name} on {device.type}"
        self.laws = subject.laws
        self.storages, self.padded_storages = subject.storages, subject.padded_storages
        self.padded_modes, self.own_calls = subject.padded_modes, subject.own_calls
        # torch's errors name devices, and some are raised on the CPU alone.
        self.own_errors = False
        subject.prepare(device)

    def placed(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    def brought(self, value: Any) -> Any:
        return value.cpu() if isinstance(value, Tensor) else value

    def excuse(self, sample: Sample) -> str | None:
        return Comparison("", sample, self.device, self.subject, "half").of_plain_tensors()

    def _placed(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else self.placed(tensor)

    def wrap(self, data: Tensor, mask: Tensor | None, requires_grad: bool = False) -> Any:
        return self.subject.wrap(self.placed(data), self._placed(mask), requires_grad)

    def padded(
        self,
        data: Tensor,
        mask: Tensor | None,
        there: Tensor,
        samples: int,
        positions: int | list[int],
        requires_grad: bool = False,
    ) -> Any:
        operands = self.placed(data), self._placed(mask), self.placed(there)
        return self.subject.padded(*operands, samples, positions, requires_grad)

    def extent(self, value: Any) -> Tensor | None:
        return self.brought(self.subject.extent(value))

    def observe(self, value: Any) -> Observed:
        data, mask = self.subject.observe(value)
        return self.brought(data), self.brought(mask)

    def remember_zero(self, value: Any) -> None:
        self.subject.remember_zero(value)

    def check_remembered(self, value: Any) -> None:
        self.subject.check_remembered(value)

    def is_value(self, value: object) -> bool:
        return self.subject.is_value(value)

    def requires_grad(self, value: Any) -> bool:
        return self.subject.requires_grad(value)

    def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.subject.call(fn, *args, **kwargs)

    def call_twice(
        self, fn: Callable[..., Any], first: tuple[Any, Any], second: tuple[Any, Any], before: Callable[[], None]
    ) -> Any:
        return self.subject.call_twice(fn, first, second, before)

    def gradients(self, scalar: Tensor, inputs: Sequence[Any], create_graph: bool = False) -> list[Any]:
        return self.subject.gradients(scalar, inputs, create_graph)

    def can_store(self, storage: str) -> bool:
        return self.subject.can_store(storage)

    def stored(self, value: Any, storage: str, requires_grad: bool, explicit_invalid: bool = False) -> Any:
        return self.subject.stored(value, storage, requires_grad, explicit_invalid)

    def densified(self) -> list[str]:
        return self.subject.densified()

    def modes(self) -> dict[str, Subject]:
        return {name: OnDevice(mode, self.device) for name, mode in self.subject.modes().items()}
