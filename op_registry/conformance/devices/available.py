"""The devices that operators can be compared on, by name."""

from __future__ import annotations

import functools

import torch

from op_registry.conformance.devices import reference

REFERENCE = "reference"
META = "meta"
XLA = "xla"
NAMES = (REFERENCE, META, XLA, "cpu", "cuda", "mps", "xpu")
# Those whose values a law cannot bring to the CPU.
WITHOUT_LAWS = (META, XLA)


class DeviceMissing(Exception):
    """This machine, or this build of torch, lacks the device; the message is torch's own."""


def device_called(name: str) -> torch.device:
    """A device by its name; raises DeviceMissing if it cannot be used.

    This registers the reference device once per process, and no other device can then take its name. It also sets up
    torchax once per process; from then on torchax computes in torch's dtypes.
    """
    if name == REFERENCE:
        _reference()
    try:
        if name == XLA:
            return _xla()
        return torch.empty(1, device=name).device
    except (RuntimeError, AssertionError, ImportError) as error:  # NotImplementedError is a RuntimeError
        raise DeviceMissing(f"{type(error).__name__}: {str(error).partition('. ')[0]}") from error


def is_there(name: str) -> bool:
    """Whether this machine has the device."""
    try:
        device_called(name)
    except DeviceMissing:
        return False
    return True


@functools.cache
def _reference() -> torch.library.Library:
    """The object that keeps the reference device's kernels registered."""
    return reference.set_up()


@functools.cache
def _xla() -> torch.device:
    """torchax's device, in jax's precise mode: 64-bit numbers keep their width, and matrix products are not rounded."""
    import torchax

    torchax.enable_accuracy_mode()
    return torch.device("jax")
