"""Along which dimensions an operator works, and how they are stored here: read off what its rule states of them."""

from __future__ import annotations

from collections.abc import Iterator

from op_registry.bound import Bound
from op_registry.dimensions import atoms
from op_registry.sparse.permuted import Permuted
from op_registry.sparse.record import Sparse


def not_along(c: Bound, stored: str) -> Iterator[str]:
    """Why a call does not only work along dimensions that are `stored` as said, "sparse" or "dense".

    It works along each dimension whose label has a role: what it does along the others, it does at each index.
    """
    labels = c.labels
    if labels is None:
        yield "its rule does not state the dimensions of this call"
        return
    for name, record in c.tensors.items():
        if not isinstance(record, (Sparse, Permuted)):
            continue
        base, groups = (record.base, record.groups) if isinstance(record, Permuted) else (record, None)
        for dim, label in enumerate(labels.operands[name]):
            here = "sparse" if min(groups[dim] if groups else (dim,)) < base.pattern.ndim else "dense"
            if here != stored and any(a in labels.roles for a in atoms(label)):
                yield f"it works along dimension {dim} of `{name}`, which is {here} here"
