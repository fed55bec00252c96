"""Masked tensors on the device written in Python; on one written in C++: tests/slow/autograd/test_device_in_cpp.py."""

from __future__ import annotations

from tests_in_device_process import passes_on


def test_masked_tensors_on_a_device_whose_backward_has_a_thread_of_its_own() -> None:
    passes_on("reference")
