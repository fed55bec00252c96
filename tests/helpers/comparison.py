"""How what calls give is compared: structures of masked and plain tensors, and what knows its extent."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import masked_dispatch as md
from op_registry.conformance.sample import tree_leaves


def same(found: Any, expected: Any, equal_nan: bool = True) -> None:
    """Equal structures and masks, close valid values, masked where masked is expected, and plain where plain is."""
    md.testing.assert_close(found, expected, equal_nan=equal_nan)
    kinds, wanted = ([md.is_masked_tensor(leaf) for leaf in tree_leaves(given)] for given in (found, expected))
    assert kinds == wanted, "plain where a masked tensor is expected, or masked where a plain one is"


def same_extents(found: Tensor, expected: Tensor) -> None:
    """The same extents, too, or none in both."""
    same(found, expected)
    assert isinstance(found, md.MaskedTensor)
    assert isinstance(expected, md.MaskedTensor)
    assert (found.extent is None) == (expected.extent is None)
    md.testing.assert_close(found, expected, check_extent=True, rtol=1e-12, atol=1e-12)
