"""Choosing a storage layout: by what a tensor costs stored so, or by an explanation to read.

A sparsely stored masked tensor is a MaskedTensor like any other: ``layout`` is strided, semantics are the same, and
``x.storage_layout`` says how it is stored. What is not stored is invalid.
"""

from masked_dispatch.api.choose import Choice, choose, choosing, explain, family_of

__all__ = ["Choice", "choose", "choosing", "explain", "family_of"]
