"""Views of permuted sparse records: which dimensions of the base make up each dimension of a new shape.

A view lists the same elements in the same order. So the new shape regroups the base's dimensions, in the order in which
the record shows them: sparse dimensions stay whole, adjacent dense ones merge and split freely.
"""

from __future__ import annotations

from collections.abc import Sequence

from op_registry.authoring import Groups, regrouped


def regroup(
    groups: Groups, sizes: Sequence[int], sparse: int, shape: Sequence[int]
) -> tuple[Groups, tuple[int, ...]] | None:
    """The groups of a view in `shape`, and the sizes of the dense dimensions of its base; None if it has no elements,
    divides a sparse dimension, or mixes sparse with dense ones in several places.

    groups  those of the record that is viewed
    sizes   the shape of its base
    sparse  the number of sparse dimensions
    """
    if 0 in shape or 0 in sizes:
        return None
    # Sparse dimensions by number; dense ones are None, and adjacent ones of them are one.
    parts: list[tuple[int, int | None]] = []
    for d in [d for group in groups for d in group]:
        if d >= sparse and parts and parts[-1][1] is None:
            parts[-1] = parts[-1][0] * sizes[d], None
        else:
            parts.append((sizes[d], d if d < sparse else None))
    result: list[tuple[int, ...]] = []
    dense: list[int] = []
    for taken, dims in regrouped(parts, shape, lambda d: d is None):
        own = [(size, d) for size, d in taken if d is not None or size != 1] or [(1, None)]
        if dims > 1 or sum(d is None for _, d in own) > 1:
            return None
        dense += [size for size, d in own if d is None]
        result.append(tuple(sparse + len(dense) - 1 if d is None else d for _, d in own))
    has_all_sparse = sum(map(len, result)) == sparse + len(dense)
    return (tuple(result), tuple(dense)) if has_all_sparse else None
