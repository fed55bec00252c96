"""tests_on_reference_device.py, in a process of its own, on a device that is written in C++."""

from __future__ import annotations

import device_in_cpp
from run_on_device import run_on_device


def test_masked_tensors_on_a_device_whose_backward_has_a_thread_of_its_own() -> None:
    run_on_device(device_in_cpp.NAME)
