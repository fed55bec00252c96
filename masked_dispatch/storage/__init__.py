"""Sparse storage: the wrapper, its differentiable boundary, and how operators get to it.

A sparsely stored masked tensor is a MaskedTensor like any other: ``layout`` is strided, semantics are the same, and
``x.storage_layout`` says how it is stored. What is not stored is invalid.
"""

from typing import Any

# The choice of representation, which most programs never ask for: imported when it is.
CHOICE = ("Choice", "choose", "choosing", "explain", "family_of")


def __getattr__(name: str) -> Any:
    if name not in CHOICE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from masked_dispatch.storage import choice

    return getattr(choice, name)
