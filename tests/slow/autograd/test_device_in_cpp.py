"""Masked tensors on a device written in C++, which is compiled first."""

from __future__ import annotations

import device_in_cpp
from tests_in_device_process import passes_on


def test_masked_tensors_on_a_device_in_cpp() -> None:
    passes_on(device_in_cpp.NAME)
