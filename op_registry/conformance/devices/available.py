"""The devices that operators can be compared on, by name."""

from __future__ import annotations

import functools

import torch

from op_registry.conformance.devices import reference

REFERENCE = "reference"
META = "meta"
NAMES = (REFERENCE, META, "cuda", "mps", "xpu")


class DeviceMissing(Exception):
    """This machine, or this build of torch, lacks the device; the message is torch's own."""


def device_called(name: str) -> torch.device:
    """A device by its name; raises DeviceMissing where it cannot be used.

    The reference device is made, once in a process: the name that it takes cannot be given to another device.
    """
    if name == REFERENCE:
        _reference()
    try:
        return torch.empty(1, device=name).device
    except (RuntimeError, AssertionError) as error:  # NotImplementedError is a RuntimeError
        raise DeviceMissing(f"{type(error).__name__}: {str(error).partition('. ')[0]}") from error


@functools.cache
def _reference() -> torch.library.Library:
    """What keeps the reference device's kernels registered."""
    return reference.set_up()
