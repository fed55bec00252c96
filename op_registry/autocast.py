"""Autocast as rules ask about it: of any device, also of those that have none (meta, and devices of other people's).

torch.is_autocast_enabled and torch.autocast raise for these.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def autocast_on(device: torch.device) -> bool:
    """Whether autocast chooses dtypes on a device."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def autocast_off(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A region in which operators compute in the dtypes that they are given."""
    return torch.autocast(device.type, enabled=False) if autocast_on(device) else contextlib.nullcontext()
