"""Embedding of sparsely stored indices."""

from __future__ import annotations

from op_registry.authoring import Bound, Sparse, on_call


@on_call(sparse="indices", dense="weight")
def embedding_of_rows(c: Bound) -> Sparse:
    """A row of the weight for each stored index."""
    return c.indices.like(c.run_with({"indices": c.indices.values}))
