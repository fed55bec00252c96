"""Choosing a storage layout by measured cost, and explaining a tensor's storage.

A sparsely stored masked tensor is a MaskedTensor like any other: ``layout`` is strided, semantics are the same, and
``x.storage_layout`` is the layout of what is stored. Elements that are not stored are invalid.
"""

from masked_dispatch.api.choose import Choice, choose, choosing, explain, family_of

__all__ = ["Choice", "choose", "choosing", "explain", "family_of"]


def __dir__() -> list[str]:
    return [*__all__]
