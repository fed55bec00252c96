"""Operators of examples/third_party on the reference device; run by test_third_party.py, in a process of its own.

Not on that device: compiled code (P7), which it is too much Python for, and row_dot, since a contraction asks
torch.autocast for a device that has no automatic mixed precision.
"""

from __future__ import annotations

from reference_device import set_up
from third_party import RULES

from op_registry.testing import instantiate

LIBRARY = set_up()

test_laws = instantiate(
    [rule for rule in RULES if rule.name != "third_party::row_dot"],
    laws=("P1", "P2", "P3", "P4", "P5", "P8"),
    layouts=("dense", "csr", "coo"),
)
