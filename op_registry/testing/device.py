"""A conformance subject on another device: computes there, and compares on the CPU.

The subject for a device is named ``op_registry.testing.device:cuda`` (or ``…:cuda_1``), so that repro lines can
refer to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.subject import Observed, Subject
from op_registry.conformance.subjects import find_subject
from op_registry.conformance.trees import tree_map


class OnDevice(Subject):
    """Another subject, with all operands moved to a device.

    Oracles and comparisons stay on the CPU: `observe` copies data and mask back, differentiably.
    """

    def __init__(self, base: Subject, device: torch.device) -> None:
        self.base = base
        self.device = device
        self.name = f"{base.name} on {device}"
        self.laws = base.laws
        self.own_errors = False  # kernels of other devices raise other errors
        self.storages = base.storages

    def wrap(self, data: Tensor, mask: Tensor | None, requires_grad: bool = False) -> Any:
        on_device = None if mask is None else mask.to(self.device)
        return self.base.wrap(data.to(self.device), on_device, requires_grad)

    def sharing(self, value: Any, owner: Any) -> Any:
        return self.base.sharing(value, owner)

    def observe(self, value: object) -> Observed:
        data, mask = self.base.observe(value)
        return data.cpu(), None if mask is None else mask.cpu()

    def is_value(self, value: object) -> bool:
        return self.base.is_value(value)

    def requires_grad(self, value: object) -> bool:
        return self.base.requires_grad(value)

    def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        moved: dict[int, tuple[Tensor, Tensor, int]] = {}

        def move(leaf: object) -> Any:
            if not isinstance(leaf, Tensor) or leaf.device == self.device:
                return leaf
            if id(leaf) not in moved:
                copy = leaf.to(self.device)
                moved[id(leaf)] = (leaf, copy, copy._version)
            return moved[id(leaf)][1]

        args, kwargs = tree_map(move, (args, kwargs))
        result = self.base.call(fn, *args, **kwargs)
        with torch.no_grad():
            for original, copy, version in moved.values():
                if copy._version != version:
                    original.copy_(copy)
        return result

    def gradients(self, scalar: Tensor, inputs: Sequence[Any], create_graph: bool = False) -> list[Any]:
        return self.base.gradients(scalar, inputs, create_graph)

    def stored(self, value: object, storage: str, requires_grad: bool, explicit_invalid: bool = False) -> Any:
        return self.base.stored(value, storage, requires_grad, explicit_invalid)

    def can_store(self, storage: str) -> bool:
        return self.base.can_store(storage)

    def densified(self) -> list[str]:
        return self.base.densified()

    def modes(self) -> dict[str, Subject]:
        return {name: OnDevice(mode, self.device) for name, mode in self.base.modes().items()}


def subject_on(device: torch.device | str, base: str | None = None) -> str | None:
    """The name of the subject for a device; for the CPU that is `base`."""
    device = torch.device(device)
    if device.type == "cpu":
        return base
    if base is not None:
        raise ValueError(f"{base} on {device}: only the default subject has a name for another device")
    return f"{__name__}:{str(device).replace(':', '_')}"


def __getattr__(name: str) -> Subject:
    """The default subject on the device of that name."""
    kind, _, index = name.partition("_")
    try:
        device = torch.device(f"{kind}:{index}" if index else kind)
    except RuntimeError:
        raise AttributeError(f"module {__name__} has no attribute {name}, and torch has no such device") from None
    return OnDevice(find_subject(), device)
