"""The laws on every sample of recurrent networks, their cells and packed sequences."""

from __future__ import annotations

import pytest

from op_registry import check

EAGER = "masked_dispatch.conformance_subject:eager"
CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
OVERLOADS = [
    *(f"aten.{name}{form}" for name in CELLS for form in (".input", ".data", "_cell")),
    "aten._pack_padded_sequence",
    "aten._pad_packed_sequence",
    "aten.pad_sequence",
]


# Lengths decide the shapes of their results, of which a graph knows too little; plain torch cannot compile them either.
WHY = "lengths decide shapes that a graph does not know"
BY_LENGTHS: dict[str, dict[str, dict[str, str]]] = {
    **{f"aten.{name}.data": {"allow": {"P7": WHY}} for name in CELLS},
    "aten._pad_packed_sequence": {"allow": {"P7": WHY}},
}


@pytest.mark.parametrize("overload", OVERLOADS)
def test_laws(overload):
    verdict = check(overload, subject=EAGER, most=None, **BY_LENGTHS.get(overload, {}))
    assert verdict, str(verdict)
    assert verdict.of("P2") == verdict.of("P3") == verdict.of("P5") == "holds"
