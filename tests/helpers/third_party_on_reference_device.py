"""Operators of examples/third_party on the reference device; run by test_third_party.py, in a process of its own.

Not on that device: compiled code (P7), which it is too much Python for.
"""

from __future__ import annotations

from third_party import RULES

from op_registry.conformance.reference_device import device_called
from op_registry.testing import instantiate

device_called("reference")

test_laws = instantiate(
    RULES,
    laws=("P1", "P2", "P3", "P4", "P5", "P8"),
    layouts=("dense", "csr", "coo"),
)
