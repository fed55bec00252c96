"""Embedding of sparsely stored indices."""

from __future__ import annotations

from typing import Any

from torch._ops import OpOverload

from op_registry.authoring import Dense, NotLowered, Sparse
from op_registry.ops.indexing import embedding


def embedding_of_rows(
    op: OpOverload, weight: Dense | Sparse, indices: Dense | Sparse, *args: Any, **kwargs: Any
) -> Sparse:
    """A row of the weight for each stored index."""
    if not isinstance(weight, Dense) or not isinstance(indices, Sparse):
        raise NotLowered("the weight is sparse")
    return indices.like(embedding.embedding.run(weight, indices.values, *args, **kwargs))
